# SPDX-License-Identifier: Apache-2.0
"""Profiling sessions, and tags, which say what a program's allocations are for."""

from typing import Any

from opacus_memprof.errors import MemprofError
from opacus_memprof.recording import native
from opacus_memprof.session.result import one_line, outcome
from opacus_memprof.session.session import Session, current, profile

__all__ = ["Session", "current", "one_line", "outcome", "profile", "retag", "tag"]


def tag(name: str) -> native.Tag:
    """Attributes allocations inside a block or a function to the category `name`.

    The category is a built-in one or the program's own. Use `with tag("teacher"):`, or the decorator `@tag("teacher")`.
    It applies to the calling thread only.

    Raises:
        MemprofError: there are more than 64 categories.
    """
    return native.Tag(category=_category_id(name))


def retag(tensors: Any, name: str) -> int:
    """Gives the memory of existing tensors the category `name`, and returns the number of changed bytes.

    Memory that other tensors share with them changes as well.

    Args:
        tensors: a tensor, an iterable of tensors, or nested sequences and mappings of tensors.
        name: the name of the category.

    Raises:
        MemprofError: there are more than 64 categories.
    """
    return native.retag(tensors, _category_id(name))


def _category_id(name: str) -> int:
    try:
        return native.category_id(name)
    except (ValueError, IndexError, RuntimeError) as error:
        raise MemprofError(f'no room for the category "{name}": {error}') from error
