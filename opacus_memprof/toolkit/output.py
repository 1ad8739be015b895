# SPDX-License-Identifier: Apache-2.0
"""The toolkit's logger, its log files, and the journal that its reports show."""

import logging
import sys
import threading
import time
from collections import deque
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from opacus_memprof.errors import MemprofError
from opacus_memprof.language import encodable, tr

MB = 2**20  # as torch's and nvidia-smi's users write it


class OneLineFormatter(logging.Formatter):
    """A formatter that replaces line breaks by spaces."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(super().format(record).splitlines())


_FILE_FORMAT = OneLineFormatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s", "%Y-%m-%d %H:%M:%S")


def echo(text: str) -> None:
    r"""Prints a text, with \u escapes for characters that the terminal cannot show."""
    print(encodable(text, getattr(sys.stdout, "encoding", None)), flush=True)


class StdoutHandler(logging.Handler):
    """A handler that prints records to the current sys.stdout."""

    def emit(self, record: logging.LogRecord) -> None:
        echo(self.format(record))


def _make_printable(record: logging.LogRecord) -> bool:
    """A log filter that passes every record, and escapes text that is not Unicode, as in some file names."""
    record.msg = str(record.msg).encode("utf-8", "backslashreplace").decode()
    return True


def _respect_root_level(record: logging.LogRecord) -> bool:
    """Passes what the root logger's level allows, if a program has set one: `logging.basicConfig(level=ERROR)`.

    The root logger's default, WARNING, is what it has when nobody has chosen. A level of the toolkit's own logger
    counts in any case.
    """
    root = logging.getLogger().level
    return root in (logging.WARNING, logging.NOTSET) or LOGGER.level != logging.INFO or record.levelno >= root


# Importing Opacus calls logging.basicConfig, which leaves the root logger at WARNING, with a handler to stderr. So the
# toolkit's logger has a separate handler and level, and does not propagate. If a program has added handlers before,
# they stay.
LOGGER = logging.getLogger("opacus_memprof.toolkit")
LOGGER.addFilter(_make_printable)
LOGGER.addFilter(_respect_root_level)
if not LOGGER.handlers:
    _console = StdoutHandler()
    _console.setFormatter(OneLineFormatter("[%(levelname)s] %(message)s"))
    LOGGER.addHandler(_console)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False


class LineFile:
    """A text file to which threads append whole lines, which are kept if the process is killed.

    Attributes:
        path: directory/prefix_YYYYMMDD_HHMMSS.suffix, with a number if the name exists; None before `make`.
    """

    def __init__(self, directory: Path, prefix: str, suffix: str) -> None:
        self.path: Path | None = None
        self._directory = directory
        self._prefix = prefix
        self._suffix = suffix
        self._lock = threading.RLock()

    def make(self) -> Path:
        """Creates the file unless it exists, and returns its path. Raises MemprofError if it cannot be written."""
        with self._lock:
            if self.path is None:
                self.path = create_file(self._directory, self._prefix, self._suffix)
            return self.path

    def append(self, line: str) -> None:
        """Appends a line. Raises MemprofError if it cannot be written."""
        with self._lock:
            path = self.make()
            try:
                with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(f"{line}\n")
            except OSError as error:
                raise _cannot_write(path, error) from error


class LineFileHandler(logging.Handler):
    """A handler that writes records to a file as lines "2024-01-15 10:30:15 - NAME - INFO - MESSAGE".

    If the file cannot be written any more, it prints a warning and stops, without an exception.
    """

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
            echo(f"[WARNING] {tr('the log ends: {error}', error=error)}")


def make_logger(name: str, file: LineFile | None) -> logging.Logger:
    """Returns a logger outside of logging's hierarchy.

    It writes each record as a line to stdout and to the file, if any.
    """
    logger = logging.Logger(name, logging.INFO)
    console = StdoutHandler()
    console.setFormatter(_FILE_FORMAT)
    logger.addHandler(console)
    if file is not None:
        logger.addHandler(LineFileHandler(file))
    return logger


def create_file(directory: Path, prefix: str, suffix: str) -> Path:
    """Creates an empty file prefix_YYYYMMDD_HHMMSS.suffix, with a number if that exists, and returns its path."""
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


JournalKind = Literal["snapshot", "model", "difference", "finding"]

# Only the latest of each kind are kept. A model's table has an entry for each of its parameters.
_journal: dict[JournalKind, deque[tuple[float, Any]]] = {
    "snapshot": deque(maxlen=1000),
    "model": deque(maxlen=100),
    "difference": deque(maxlen=1000),
    "finding": deque(maxlen=1000),
}


def add_to_journal(kind: JournalKind, *entries: Any) -> None:
    """Adds entries to the journal of this process, which reports show."""
    now = time.monotonic()
    _journal[kind].extend((now, entry) for entry in entries)


def journal_since(kind: JournalKind, since: float = 0.0) -> list[Any]:
    """Returns the journal's entries since a time of time.monotonic(), oldest first."""
    return [entry for time_added, entry in list(_journal[kind]) if time_added >= since]


def clear_journal() -> None:
    """Removes all entries of the journal."""
    for entries in _journal.values():
        entries.clear()
