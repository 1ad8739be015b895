# SPDX-License-Identifier: Apache-2.0
"""Where the toolkit's words go: the program's logging or the console, and files that are whole or grow by lines."""

import logging
import sys
from datetime import datetime
from pathlib import Path

from opacus_memprof.errors import MemprofError

MB = 2**20  # as torch's and nvidia-smi's users write it

_LOGGER = logging.getLogger("opacus_memprof.toolkit")


def say(message: str, level: int = logging.INFO) -> None:
    """Through the program's logging where it has set that up (logger "opacus_memprof.toolkit"), else printed."""
    if _LOGGER.hasHandlers():
        _LOGGER.log(level, message)
    elif level >= logging.INFO:
        echo(f"[{logging.getLevelName(level)}] {message}")


def echo(text: str) -> None:
    """Prints, with ? for what an ASCII terminal has no letter for."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), flush=True)


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


def append_line(path: Path, line: str) -> None:
    """Adds one line, which a killed process leaves behind whole. Raises MemprofError."""
    try:
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(" ".join(line.splitlines()) + "\n")
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> MemprofError:
    return MemprofError(f"cannot write {path} ({error.strerror}): choose another place")
