# SPDX-License-Identifier: Apache-2.0
"""Snapshots may have names without end, and leave names for operations."""

import subprocess
import sys

PROGRAM = """
from opacus_memprof.recording import native

for number in range(70_000):
    native.snapshot(f"step {number}")
operation = native.op_id("an operation")
names = native.names()["ops"]
print("step 0" in names, len(names) <= 2**15 + 1, names[operation])
"""


def test_names_of_snapshots_leave_room_for_operations() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "True True an operation\n", ended.stderr
