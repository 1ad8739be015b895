# SPDX-License-Identifier: Apache-2.0
"""Files that readers see whole, the old one or the new one, and JSON objects read from them."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opacus_memprof.errors import MemprofError


@contextlib.contextmanager
def writing(target: Path) -> Iterator[None]:
    """What the block cannot write for `target`, its directory included, is a MemprofError that names it."""
    try:
        yield
    except OSError as error:
        raise MemprofError(f"cannot write {target} ({error.strerror or error}): choose another place") from error


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file to write, which becomes `path` when the block ends without an exception.

    Makes the directory. Raises MemprofError where `path` cannot be written.
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
    """UTF-8, by `replacing`, as which it raises; with escapes for what is no text, such as parts of some file names."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    return Path(path)


def read_object(path: Path, remedy: str = "remove it, or profile again") -> dict[str, Any]:
    """The JSON object in a file of ours.

    Raises:
        MemprofError: it cannot be read, or holds none; `remedy` is what to do then.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError) as error:
        raise MemprofError(f"{path} cannot be read ({error}): {remedy}") from error
    return content
