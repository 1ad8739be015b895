# SPDX-License-Identifier: Apache-2.0
"""All operators that torch's own tests have samples of, on a virtual GPU: as on the CPU, or it is said.

scripts/virtual_operators.py compares them: one sample of every fourth, and nightly eight of each, half of the operators
in each test.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.warm_python import ENVIRONMENT

PROGRAM = Path(__file__).parent / "scripts" / "virtual_operators.py"
SHARDS = 2
AT_NIGHT = [pytest.param(8, shard, SHARDS, marks=pytest.mark.nightly) for shard in range(SHARDS)]

# For the CPU alone, by what torch itself says, or with an option that is for the CPU alone.
REFUSED = {
    "linalg.lstsq",
    "linalg.lstsq.grad_oriented",
    "sparse.mm.reduce",
    "tensor_split",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or torch.version.cuda is None, reason="needs a torch with CUDA for Linux"
    ),
]


@pytest.mark.parametrize(("samples", "shard", "shards"), [(1, 0, 4), *AT_NIGHT])
def test_operators_give_what_the_cpu_gives_or_it_is_said(samples: int, shard: int, shards: int) -> None:
    command = [sys.executable, PROGRAM, *map(str, (samples, shard, shards))]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=900, env=ENVIRONMENT)
    assert completed.returncode == 0, completed.stderr
    found = json.loads(completed.stdout.splitlines()[-1])
    silent = {name for name, (outcome, _) in found.items() if outcome == "silent"}
    refused = {name: reason for name, (outcome, reason) in found.items() if outcome == "refused"}
    assert silent == set()
    assert refused.keys() <= REFUSED, refused
    equal = sum(outcome == "equal" for outcome, _ in found.values())
    assert equal > 660 / shards
    assert equal >= 0.95 * len(found)
