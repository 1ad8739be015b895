# SPDX-License-Identifier: Apache-2.0
"""The directory of the results of many runs."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.directory import LOCK, lock
from opacus_memprof.profiles.files import read_regular, writing


@contextmanager
def locked_directory(path: Path, refuse_other_files: Callable[[], object]) -> Iterator[None]:
    """A context manager that makes a directory and locks it for this process.

    Args:
        path: the absolute path.
        refuse_other_files: raises MemprofError if the directory holds files that must not be mixed with the results.
            Called before and after locking, because another process may write files in between.

    Raises:
        MemprofError: another process holds the lock, or `refuse_other_files` raises it.
        OSError: the directory cannot be written.
    """
    refuse_other_files()
    path.mkdir(parents=True, exist_ok=True)
    descriptor = lock(path)
    try:
        refuse_other_files()
        yield
    finally:
        with contextlib.suppress(OSError):
            (path / LOCK).unlink()
        os.close(descriptor)


class Journal:
    """A file with one JSON object per line, for each run that has ended.

    Args:
        path: the path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def exists(self) -> bool:
        """Returns whether the file exists."""
        return self._path.exists()

    def clear(self) -> None:
        """Empties the file, and creates it if needed. Raises MemprofError if it cannot be written."""
        with writing(self._path):
            self._path.write_bytes(b"")

    def append(self, entry: Mapping[str, Any]) -> None:
        """Appends an entry. Raises MemprofError if the file cannot be written."""
        with writing(self._path), open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def entries(self) -> Iterator[Any]:
        """Yields the entries. Skips a partial line, which a killed process may leave."""
        if not self.exists():
            return
        try:
            lines = read_regular(self._path).splitlines()
        except OSError as error:
            raise MemprofError(f"{self._path} cannot be read ({error.strerror}): choose another directory") from error
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                yield json.loads(line)
