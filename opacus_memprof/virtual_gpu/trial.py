# SPDX-License-Identifier: Apache-2.0
"""Tries a virtual GPU in a new process, where torch is not imported yet and a failure does no harm."""

import subprocess
import sys
from pathlib import Path

_TIMEOUT_S = 120
_REFUSED = 2  # exit code
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
requested = torch.cuda.memory_stats()["requested_bytes.all.current"]
assert torch.cuda.get_device_name() == "NVIDIA H200", torch.cuda.get_device_name()
assert product.shape == matrix.shape
assert requested >= 2 * matrix.nbytes, f"two matrices of 1 MiB are counted as {{requested}} bytes"
"""


def find_failure() -> tuple[str, bool] | None:
    """Runs a small computation on a virtual GPU.

    Returns:
        None if it works. Otherwise a sentence, and whether it is a MemprofError's, which says what to do.
    """
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"a trial did not end within {_TIMEOUT_S} s", False
    if ran.returncode == 0:
        return None
    if ran.returncode == _REFUSED and ran.stdout.strip():
        return ran.stdout.strip(), True
    last = ran.stderr.strip().rpartition("\n")[2]
    return f"a trial ended with exit code {ran.returncode}" + (f" ({last})" if last else ""), False
