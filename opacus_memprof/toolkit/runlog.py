# SPDX-License-Identifier: Apache-2.0
"""The log of one profiler: lines with their time, on the console and in a file."""

from datetime import datetime
from pathlib import Path

from opacus_memprof.toolkit.output import append_line, claim, echo


class RunLog:
    """Lines "2024-01-15 10:30:15 - MemoryProfiler_20240115_103015 - INFO - ...". Each is in the file once it is said.

    Attributes:
        path: of the file; None without one.

    Raises:
        MemprofError: the file cannot be made or written.
    """

    def __init__(self, directory: Path, name: str, *, to_file: bool) -> None:
        self.path = claim(directory, "memory_profiler", ".log") if to_file else None
        stamp = f"{datetime.now():_%Y%m%d_%H%M%S}"
        if self.path is not None:
            stamp = self.path.stem.removeprefix("memory_profiler")
        self._name = f"{name}{stamp}"

    def info(self, message: str) -> None:
        """Says one line; line breaks in it become spaces."""
        line = f"{datetime.now():%Y-%m-%d %H:%M:%S} - {self._name} - INFO - {' '.join(message.splitlines())}"
        echo(line)
        if self.path is not None:
            append_line(self.path, line)
