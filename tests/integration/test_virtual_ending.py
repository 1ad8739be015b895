# SPDX-License-Identifier: Apache-2.0
"""A program on a virtual GPU ends when its threads are at rest."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("opacus_memprof._virtual") is None,
    reason="the virtual GPU was not built: torch has no CUDA",
)

# The thread works without the GIL, as autograd's do, and wants it afterwards.
PROGRAM = """
import hashlib, sys, threading
from opacus_memprof import virtual_gpu

virtual_gpu.start("h200")
import torch

torch.nn.Linear(64, 64).cuda()(torch.randn(8, 64).cuda()).sum().backward()
begun = threading.Event()

def work():
    begun.set()
    hashlib.sha256(bytes(100_000_000)).digest()
    open(sys.argv[1], "w").write("done")

threading.Thread(target=work, daemon=True).start()
begun.wait()
"""


def test_the_end_waits_for_threads_that_run(tmp_path: Path) -> None:
    file = tmp_path / "done"
    ran = subprocess.run([sys.executable, "-c", PROGRAM, str(file)], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert file.read_text() == "done"
