# SPDX-License-Identifier: Apache-2.0
"""All operators that torch's own tests have samples of, on a virtual GPU: as on the CPU, or it is said.

scripts/virtual_operators.py compares them, half of them in each test.
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

# For the CPU alone, by what torch itself says.
REFUSED = {
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


@pytest.mark.parametrize("shard", range(SHARDS))
def test_operators_give_what_the_cpu_gives_or_it_is_said(shard: int) -> None:
    completed = subprocess.run(
        [sys.executable, PROGRAM, str(shard), str(SHARDS)], capture_output=True, text=True, timeout=900, env=ENVIRONMENT
    )
    assert completed.returncode == 0, completed.stderr
    found = json.loads(completed.stdout.splitlines()[-1])
    silent = {name for name, (outcome, _) in found.items() if outcome == "silent"}
    refused = {name: reason for name, (outcome, reason) in found.items() if outcome == "refused"}
    assert silent == set()
    assert refused.keys() <= REFUSED, refused
    equal = sum(outcome == "equal" for outcome, _ in found.values())
    assert equal > 330
    assert equal >= 0.95 * len(found)
