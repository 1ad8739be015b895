# SPDX-License-Identifier: Apache-2.0
"""Each case of allocator_cases.py has the same outcome with torch's own allocator and with ours over it."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.on_virtual_gpu import interpreter

pytestmark = pytest.mark.cuda


def outcomes(how: str, settings: str) -> dict[str, Any]:
    environment = {"PYTORCH_CUDA_ALLOC_CONF": settings, "PYTORCH_ALLOC_CONF": settings}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [*interpreter(), "-m", "tests.gpu.allocator_cases", how]
    ended = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_each_case_is_as_with_torchs_own_allocator(settings: str) -> None:
    expected = outcomes("native", settings)
    failed = {name: outcome for name, outcome in expected.items() if isinstance(outcome, str)}
    assert not failed
    assert outcomes("install", settings) == expected
    assert outcomes("current", settings) == expected
