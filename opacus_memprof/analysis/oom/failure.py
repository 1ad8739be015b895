# SPDX-License-Identifier: Apache-2.0
"""A failed allocation and the blocks that were live then, with the category names of reports."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from opacus_memprof.profiles.categories import ACTIVATION_HOOKS, name_at_failure

ACTIVATIONS = ("activations", ACTIVATION_HOOKS)


@dataclass(frozen=True)
class BlockGroup:
    """Live blocks of the same category that were allocated by the same module and op, in the same phase and step.

    Attributes:
        bytes: of all blocks.
        blocks: their number.
        largest: bytes of the largest one.
    """

    bytes: int
    blocks: int
    largest: int
    category: str
    module: str
    op: str
    phase: str
    step: int


@dataclass(frozen=True)
class Failure:
    """An allocation that failed. Sizes are in bytes.

    Attributes:
        requested: the size of the allocation, which was for `category`, `module`, `op`, `phase` and `step`.
        block_groups: the live blocks on `device`, the largest first.
        upstream: the counts of torch's allocator and the device (see native.failures).
    """

    number: int
    device: str
    requested: int
    category: str
    module: str
    op: str
    phase: str
    step: int
    logical_step: int
    unix_ns: int
    block_groups: tuple[BlockGroup, ...]
    upstream: Mapping[str, int | None]

    @property
    def live_bytes(self) -> int:
        return sum(group.bytes for group in self.block_groups)

    def sum_by(self, key: Callable[[BlockGroup], Any]) -> dict[Any, int]:
        """Returns live bytes by `key`, the largest first."""
        return sum_by(self.block_groups, key)


def sum_by(block_groups: Iterable[BlockGroup], key: Callable[[BlockGroup], Any]) -> dict[Any, int]:
    """Returns the bytes of groups by `key`, the largest first."""
    sizes: dict[Any, int] = {}
    for group in block_groups:
        sizes[key(group)] = sizes.get(key(group), 0) + group.bytes
    return dict(sorted(sizes.items(), key=lambda item: (-item[1], str(item[0]))))


def read_failure(native: Mapping[str, Any]) -> Failure:
    """Reads one of native.failures(). Blocks that a forward pass allocated count as activations if they are live when
    memory runs out.
    """
    groups = [
        BlockGroup(**{**group, "category": name_at_failure(group["category"])})
        for group in native["holdings"]
        if group["bytes"]
    ]
    rest = {key: value for key, value in native.items() if key not in ("holdings", "category")}
    return Failure(**rest, category=name_at_failure(native["category"]), block_groups=tuple(groups))
