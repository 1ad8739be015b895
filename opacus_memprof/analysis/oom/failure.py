# SPDX-License-Identifier: Apache-2.0
"""An allocation that failed, and what was live then, in the words of reports."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from opacus_memprof.profiles.categories import ACTIVATION_HOOKS, FORWARD_UNDECIDED, reported_name

ACTIVATIONS = ("activations", ACTIVATION_HOOKS)


@dataclass(frozen=True)
class Holding:
    """Live blocks of one origin: their category, and module, op, phase and step of their birth."""

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
    """Bytes throughout.

    Attributes:
        requested: what was not to be had; `category`, `module`, `op`, `phase` and `step` say for what.
        holdings: what was live on `device`, the largest first.
        upstream: what allocator and device said (_native.failures).
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
    holdings: tuple[Holding, ...]
    upstream: Mapping[str, int | None]

    @property
    def live(self) -> int:
        return sum(holding.bytes for holding in self.holdings)

    def totals(self, key: Callable[[Holding], Any]) -> dict[Any, int]:
        """Live bytes by `key`, the largest first."""
        return totals(self.holdings, key)


def totals(holdings: Iterable[Holding], key: Callable[[Holding], Any]) -> dict[Any, int]:
    found: dict[Any, int] = {}
    for holding in holdings:
        found[key(holding)] = found.get(key(holding), 0) + holding.bytes
    return dict(sorted(found.items(), key=lambda item: (-item[1], str(item[0]))))


def read(native: Mapping[str, Any]) -> Failure:
    """One of _native.failures(). What was made in forward and is live when memory runs out is an activation."""
    holdings = [Holding(**{**one, "category": _public(one["category"])}) for one in native["holdings"] if one["bytes"]]
    rest = {key: value for key, value in native.items() if key not in ("holdings", "category")}
    return Failure(**rest, category=_public(native["category"]), holdings=tuple(holdings))


def _public(category: str) -> str:
    return "activations" if category == FORWARD_UNDECIDED else reported_name(category)
