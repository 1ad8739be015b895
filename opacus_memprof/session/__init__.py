# SPDX-License-Identifier: Apache-2.0
"""A profiling session, from its start to its profile, and tags, which say what a program's allocations are for."""

from typing import Any

from opacus_memprof.errors import MemprofError
from opacus_memprof.recording import native
from opacus_memprof.session.result import one_line, outcome
from opacus_memprof.session.session import Session, current, profile

__all__ = ["Session", "current", "one_line", "outcome", "profile", "retag", "tag"]


def tag(name: str) -> native.Tag:
    """Attributes what is allocated inside to the category `name`, the program's own or a built-in one.

    As `with tag("teacher"):` or as a decorator, `@tag("teacher")`. It holds for the calling thread.

    Raises:
        MemprofError: there are more than 64 categories.
    """
    return native.Tag(category=_category_id(name))


def retag(tensors: Any, name: str) -> int:
    """Gives what is allocated already, under these tensors, the category `name`; returns the bytes that this changed.

    `tensors` is one, an iterable of them, or sequences and mappings that nest some. What another tensor shares with
    them changes as well. Raises MemprofError as `tag` does.
    """
    return native.retag(tensors, _category_id(name))


def _category_id(name: str) -> int:
    try:
        return native.category_id(name)
    except (ValueError, IndexError, RuntimeError) as error:
        raise MemprofError(f'no room for the category "{name}": {error}') from error
