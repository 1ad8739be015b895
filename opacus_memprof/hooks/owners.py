# SPDX-License-Identifier: Apache-2.0
"""Which module a parameter belongs to, for those who meet the parameter without its module.

By identity number: holding a parameter would keep it alive, and torch refuses to swap tensors that are weakly
referenced.
"""

from collections.abc import Iterable
from typing import Any

_owners: dict[int, int] = {}


def owner_of(parameter: Any) -> int:
    """The parameter's module id; 0 if no attached model has it."""
    return _owners.get(id(parameter), 0)


def owners_of(parameters: Iterable[Any]) -> list[int]:
    """As `owner_of`, for each."""
    return [_owners.get(number, 0) for number in map(id, parameters)]


def set_owner(parameter: Any, module_id: int) -> int:
    """Returns the key for `forget_owners`."""
    _owners[id(parameter)] = module_id
    return id(parameter)


def forget_owners(keys: Iterable[int]) -> None:
    for key in keys:
        _owners.pop(key, None)
