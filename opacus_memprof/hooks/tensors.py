# SPDX-License-Identifier: Apache-2.0
"""Tensors in what programs pass around."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested sequences and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, (dict, Mapping)):  # the first is asked far faster
        for item in value.values():
            yield from tensors_in(item)
