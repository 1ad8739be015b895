# SPDX-License-Identifier: Apache-2.0
"""Readings as JSON, one a line."""

import json
import os
from io import FileIO
from pathlib import Path
from typing import Any

from opacus_memprof.errors import MemprofError


class JsonLines:
    """Appends to a file. When that is full it becomes `path.1`, in the place of the one before, so that both together
    never exceed twice `max_bytes`. Categories without bytes are left out.

    Args:
        path: of the file.
        max_bytes: of one file; by default about a day of a reading every ten seconds.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int = 8 * 2**20) -> None:
        self._path = Path(path).absolute()  # the program may change its own
        self._max_bytes = max_bytes
        self._file: FileIO | None = None

    def __str__(self) -> str:
        return str(self._path)

    def open(self) -> None:
        """Makes the directory. Raises MemprofError where the file cannot be written."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (until close)
        except OSError as error:
            raise MemprofError(f"cannot stream to {self._path} ({error.strerror}): choose another file") from error

    def write(self, reading: dict[str, Any]) -> None:
        """Whole lines only: a reader of the file never sees a part of one, unless the disk is full. Raises OSError."""
        devices = {
            name: {**device, "categories": {key: size for key, size in device["categories"].items() if size}}
            for name, device in reading["devices"].items()
        }
        line = json.dumps({**reading, "devices": devices}, separators=(",", ":")).encode() + b"\n"
        assert self._file is not None
        if self._file.tell() + len(line) > self._max_bytes and self._file.tell():
            self._file.close()
            os.replace(self._path, f"{self._path}.1")
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
        self._file.write(line)

    def close(self) -> None:
        """The file stays."""
        if self._file is not None:
            self._file.close()
