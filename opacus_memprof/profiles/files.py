# SPDX-License-Identifier: Apache-2.0
"""Writes files atomically, and reads JSON objects from files."""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opacus_memprof.errors import MemprofError


@contextlib.contextmanager
def writing(target: Path) -> Iterator[None]:
    """Converts an OSError to a MemprofError that names `target`."""
    try:
        yield
    except OSError as error:
        raise MemprofError(f"cannot write {target} ({error.strerror or error}): choose another place") from error


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary file, which replaces `path` if the block ends without an exception.

    Makes the directory of `path`. Raises MemprofError if `path` cannot be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            os.replace(temporary, target)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Writes UTF-8 text atomically, and returns the path. Text that is not Unicode is escaped.

    Raises:
        MemprofError: the file cannot be written.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    return Path(path)


def read_regular(path: Path) -> bytes:
    """Reads a file. Raises OSError if it cannot be read, or is a pipe or device, which might never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait for its writer
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return file.read()


def read_object(path: Path, remedy: str = "remove it, or profile again") -> dict[str, Any]:
    """Reads a JSON object from a file.

    Raises:
        MemprofError: the file cannot be read or does not hold a JSON object. The message ends with `remedy`.
    """
    try:
        content = json.loads(read_regular(path).decode("utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MemprofError(f"{path} cannot be read ({reason}): {remedy}") from error
    except RecursionError:
        raise MemprofError(f"{path} cannot be read (its objects are nested too deeply): {remedy}") from None
    if not isinstance(content, dict):
        raise MemprofError(f"{path} cannot be read (it is not a JSON object): {remedy}")
    return content
