# SPDX-License-Identifier: Apache-2.0
"""Files that readers see whole: the old one or the new one."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from opacus_memprof.errors import MemprofError


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file to write, which becomes `path` when the block ends without an exception.

    Makes the directory. Raises MemprofError where `path` cannot be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            os.replace(temporary, target)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise MemprofError(f"cannot write {target} ({error.strerror or error}): choose another place") from error
