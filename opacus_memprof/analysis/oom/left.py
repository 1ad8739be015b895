# SPDX-License-Identifier: Apache-2.0
"""What earlier steps, or forwards that no backward followed, have left behind when an allocation failed."""

from collections.abc import Mapping
from dataclasses import dataclass

from opacus_memprof.analysis.oom.failure import Failure, Holding, totals
from opacus_memprof.profiles.categories import PER_SAMPLE

# What a step makes and the next one has freed, where nothing holds on to it.
_MAY_STAY = PER_SAMPLE | {"unattributed", "noise", "summed_gradients", "optimizer_temporaries"}
_MIN_STEPS = 3
# What a step makes of its batch: nothing has a reason to live through two more steps. Batches are loaded ahead.
_OF_A_BATCH = PER_SAMPLE - {"inputs"}
_MIN_SHARE = 0.02  # of all live bytes, by each of two steps


@dataclass(frozen=True)
class Left:
    """Bytes.

    Attributes:
        holdings: live blocks of which `part` was left behind.
        captures: of Opacus, which await a backward; else something else holds on to them.
    """

    holdings: tuple[Holding, ...] = ()
    part: float = 1.0
    captures: bool = False

    @property
    def bytes(self) -> int:
        return sum(self.by_category.values())

    @property
    def by_category(self) -> dict[str, int]:
        return {category: int(size * self.part) for category, size in _sizes(self.holdings).items()}

    @property
    def by_module(self) -> dict[str, int]:
        return {name: int(size * self.part) for name, size in totals(self.holdings, lambda one: one.module).items()}

    @property
    def steps(self) -> list[int]:
        return sorted({holding.step for holding in self.holdings})

    def before(self, step: int) -> dict[str, int]:
        """By category, what steps before this one had left."""
        if self.captures:
            return {}
        return _sizes(tuple(one for one in self.holdings if one.step < step))


def _sizes(holdings: tuple[Holding, ...]) -> dict[str, int]:
    return totals(holdings, lambda one: one.category)


def left_behind(failure: Failure, captures: Mapping[str, int]) -> Left:
    """Blocks of one category that at least three earlier steps have made, the last one not counted, or two if these are
    all there were and it is much of what a batch makes; or, of Opacus' captures, all but the latest of each module.

    Args:
        captures: by module, captures that await a backward, where several forwards in a row had begun with some.
    """
    if captures:
        most = max(captures.values())
        held = tuple(one for one in failure.holdings if one.category == "activation_hooks")
        return Left(held, (most - 1) / most, captures=True)
    earlier = [
        one
        for one in failure.holdings
        if one.step < failure.step and one.category in _MAY_STAY and (one.step or one.phase not in ("idle", "setup"))
    ]
    settled = totals((one for one in earlier if one.step < failure.step - 1), lambda one: (one.category, one.step))
    born: dict[str, dict[int, int]] = {}
    for (category, step), size in settled.items():
        born.setdefault(category, {})[step] = size
    stays = {
        category
        for category, sizes in born.items()
        if len(sizes) >= _MIN_STEPS
        or (category in _OF_A_BATCH and failure.step == _MIN_STEPS and _both_left_much(sizes, failure.live))
    }
    return Left(tuple(one for one in earlier if one.category in stays))


def _both_left_much(sizes: Mapping[int, int], live: int) -> bool:
    """Of the first two steps."""
    return all(sizes.get(step, 0) >= _MIN_SHARE * live for step in (0, 1))
