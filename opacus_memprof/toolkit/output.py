# SPDX-License-Identifier: Apache-2.0
"""Where the toolkit's words go: a logger with a console of its own, and files that grow by whole lines."""

import logging
import sys
import threading
from datetime import datetime
from pathlib import Path

from opacus_memprof.errors import MemprofError

MB = 2**20  # as torch's and nvidia-smi's users write it


class OneLine(logging.Formatter):
    """Line breaks in a message become spaces."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(super().format(record).splitlines())


_FILE_FORMAT = OneLine("%(asctime)s - %(name)s - %(levelname)s - %(message)s", "%Y-%m-%d %H:%M:%S")


def echo(text: str) -> None:
    """Prints, with ? for what an ASCII terminal has no letter for."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), flush=True)


class Console(logging.Handler):
    """Prints records to what sys.stdout is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        echo(self.format(record))


def _make_printable(record: logging.LogRecord) -> bool:
    """A filter that lets everything pass: names that are no Unicode, as of some files, are escaped for all handlers."""
    record.msg = str(record.msg).encode("utf-8", "backslashreplace").decode()
    return True


# Importing Opacus calls logging.basicConfig, which leaves the root logger at WARNING, with a handler to stderr. So the
# toolkit's logger has its own handler and level, and does not propagate. A program that has given it handlers before
# keeps those.
LOGGER = logging.getLogger("opacus_memprof.toolkit")
LOGGER.addFilter(_make_printable)
if not LOGGER.handlers:
    _console = Console()
    _console.setFormatter(OneLine("[%(levelname)s] %(message)s"))
    LOGGER.addHandler(_console)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False


class LineFile:
    """A file that grows by whole lines, which a killed process leaves behind. Threads may share it.

    Attributes:
        path: directory/prefix_YYYYMMDD_HHMMSS.suffix, numbered where another took the second; None before `make`.
    """

    def __init__(self, directory: Path, prefix: str, suffix: str) -> None:
        self.path: Path | None = None
        self._directory = directory
        self._prefix = prefix
        self._suffix = suffix
        self._lock = threading.RLock()

    def make(self) -> Path:
        """Makes the empty file, unless that was done, and returns its path. Raises MemprofError."""
        with self._lock:
            if self.path is None:
                self.path = claim(self._directory, self._prefix, self._suffix)
            return self.path

    def append(self, line: str) -> None:
        """Adds a line. Raises MemprofError."""
        with self._lock:
            path = self.make()
            try:
                with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(f"{line}\n")
            except OSError as error:
                raise _cannot_write(path, error) from error


class FileLog(logging.Handler):
    """Writes records to a file as lines "2024-01-15 10:30:15 - NAME - INFO - MESSAGE". A file that can be written no
    longer ends, with a warning on the console: the program is not to die of it."""

    def __init__(self, file: LineFile) -> None:
        super().__init__()
        self._file: LineFile | None = file
        self.setFormatter(_FILE_FORMAT)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._file is not None:
                self._file.append(self.format(record))
        except MemprofError as error:
            self._file = None
            echo(f"[WARNING] the log ends: {error}")


def run_logger(name: str, file: LineFile | None) -> logging.Logger:
    """A logger that nothing else configures: each record is a line on the console and, where there is one, in the file,
    in the same format."""
    logger = logging.Logger(name, logging.INFO)
    console = Console()
    console.setFormatter(_FILE_FORMAT)
    logger.addHandler(console)
    if file is not None:
        logger.addHandler(FileLog(file))
    return logger


def claim(directory: Path, prefix: str, suffix: str) -> Path:
    """A new empty file, prefix_YYYYMMDD_HHMMSS.suffix, or with a number where another took the second."""
    stem = f"{prefix}_{datetime.now():%Y%m%d_%H%M%S}"
    number = 1
    try:
        directory.mkdir(parents=True, exist_ok=True)
        while True:
            path = directory / f"{stem}{'' if number == 1 else f'_{number}'}{suffix}"
            try:
                path.open("x").close()
            except FileExistsError:
                number += 1
            else:
                return path
    except OSError as error:
        raise _cannot_write(directory, error) from error


def _cannot_write(path: Path, error: OSError) -> MemprofError:
    return MemprofError(f"cannot write {path} ({error.strerror}): choose another place")
