# SPDX-License-Identifier: Apache-2.0
"""Each case of allocator_cases.py has the same outcome with torch's own allocator and with ours over it."""

import json
import subprocess
from typing import Any

import pytest

from tests.on_virtual_gpu import interpreter
from tests.warm_python import ENVIRONMENT

pytestmark = pytest.mark.cuda


def outcomes(settings: str) -> list[dict[str, Any]]:
    environment = {"PYTORCH_CUDA_ALLOC_CONF": settings, "PYTORCH_ALLOC_CONF": settings}
    command = [*interpreter(), "-m", "tests.gpu.allocator_cases"]
    ended = subprocess.run(command, env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()[-3:]]


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_each_case_is_as_with_torchs_own_allocator(settings: str) -> None:
    expected, *ours = outcomes(settings)
    failed = {name: outcome for name, outcome in expected.items() if isinstance(outcome, str)}
    assert not failed
    assert ours == [expected, expected]
