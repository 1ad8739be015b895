# SPDX-License-Identifier: Apache-2.0
"""Tries a virtual GPU in a process of its own, where nothing has imported torch and a failure harms nobody."""

import subprocess
import sys
from pathlib import Path

_TIMEOUT_S = 120
_REFUSED = 2
_PROGRAM = f"""
import sys
sys.path.append({str(Path(__file__).parents[2])!r})
from opacus_memprof import virtual_gpu
from opacus_memprof.errors import MemprofError
try:
    virtual_gpu.start("h200")
except MemprofError as error:
    sys.exit(print(error) or {_REFUSED})
import torch
matrix = torch.ones(512, 512, device="cuda")
product = matrix @ matrix
held = torch.cuda.memory_stats()["requested_bytes.all.current"]
assert torch.cuda.get_device_name() == "NVIDIA H200", torch.cuda.get_device_name()
assert product.shape == matrix.shape
assert held >= 2 * matrix.nbytes, f"two matrices of 1 MiB are counted as {{held}} bytes"
"""


def why_it_fails() -> tuple[str, bool] | None:
    """Why a virtual GPU does not work here, and whether this was foreseen; None where it works."""
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"a trial was not over after {_TIMEOUT_S} s", False
    if ran.returncode == 0:
        return None
    if ran.returncode == _REFUSED and ran.stdout.strip():
        return ran.stdout.strip(), True
    last = ran.stderr.strip().rpartition("\n")[2]
    return f"a trial ended with exit code {ran.returncode}" + (f" ({last})" if last else ""), False
