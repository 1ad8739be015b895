# SPDX-License-Identifier: Apache-2.0
"""Writes readings to a file as JSON, one per line."""

import os
from io import FileIO
from pathlib import Path

import msgspec
from msgspec.structs import replace

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.live_memory import LiveMemory


class JsonLines:
    """A sink that appends to a file. When the file is full it is renamed to `path.1`, replacing an older one, so that
    both together never exceed twice `max_bytes`. Categories without bytes are left out.

    Args:
        path: of the file.
        max_bytes: of one file. The default holds about a day of readings, one every ten seconds.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int = 8 * 2**20) -> None:
        self._path = Path(path).absolute()  # the program may change its working directory
        self._max_bytes = max_bytes
        self._file: FileIO | None = None

    def __str__(self) -> str:
        return str(self._path)

    def open(self) -> None:
        """Opens the file, creating its directory. Raises MemprofError if it cannot be written."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (until close)
        except OSError as error:
            raise MemprofError(f"cannot stream to {self._path} ({error.strerror}): choose another file") from error

    def write(self, reading: LiveMemory) -> None:
        """Appends a line in one write, so that readers of the file never see part of a line unless the disk is full.
        Raises OSError."""
        devices = {
            name: replace(device, categories={key: size for key, size in device.categories.items() if size})
            for name, device in reading.devices.items()
        }
        line = msgspec.json.encode(replace(reading, devices=devices)) + b"\n"
        assert self._file is not None
        if self._file.tell() + len(line) > self._max_bytes and self._file.tell():
            self._file.close()
            os.replace(self._path, f"{self._path}.1")
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
        self._file.write(line)

    def close(self) -> None:
        """Closes the file, which stays."""
        if self._file is not None:
            self._file.close()
