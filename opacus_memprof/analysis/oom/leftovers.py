# SPDX-License-Identifier: Apache-2.0
"""Leftovers: live blocks that earlier steps, or forwards without a backward, should have released."""

from collections.abc import Mapping
from dataclasses import dataclass

from opacus_memprof.analysis.oom.failure import BlockGroup, Failure, sum_by
from opacus_memprof.profiles.categories import ACTIVATION_HOOKS, PER_SAMPLE

# Blocks of these categories are allocated by a step and freed by the next, unless a reference keeps them alive.
_OF_A_STEP = PER_SAMPLE | {"unattributed", "noise", "summed_gradients", "optimizer_temporaries"}
_MIN_STEPS = 3
# Categories whose size depends on the batch, without inputs, because data loaders load batches ahead.
_OF_A_BATCH = PER_SAMPLE - {"inputs"}
SIZED_BY_CAPTURES = "create_or_accumulate_grad_sample"  # Opacus sizes its result by the largest batch captured
_MIN_SHARE = 0.02  # of all live bytes, for each of two steps


@dataclass(frozen=True)
class Leftovers:
    """Blocks that should have been released. Sizes are in bytes.

    Attributes:
        block_groups: live blocks, of which `fraction` are leftovers.
        are_captures: they are Opacus' captures, which no backward has released. Otherwise references keep them alive.
        stray_samples: the batch sizes of the forwards that captured them, if Opacus sizes per-sample gradients by one
            of these.
    """

    block_groups: tuple[BlockGroup, ...] = ()
    fraction: float = 1.0
    are_captures: bool = False
    stray_samples: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(self.by_category.values())

    @property
    def by_category(self) -> dict[str, int]:
        sizes = _by_category(self.block_groups)
        return {category: int(size * self.fraction) for category, size in sizes.items()}

    @property
    def by_module(self) -> dict[str, int]:
        sizes = sum_by(self.block_groups, lambda group: group.module)
        return {name: int(size * self.fraction) for name, size in sizes.items()}

    @property
    def steps(self) -> list[int]:
        return sorted({group.step for group in self.block_groups})

    def from_before(self, step: int) -> dict[str, int]:
        """The leftovers of steps before `step`, by category."""
        if self.are_captures:
            return {}
        return _by_category(tuple(group for group in self.block_groups if group.step < step))


def _by_category(block_groups: tuple[BlockGroup, ...]) -> dict[str, int]:
    return sum_by(block_groups, lambda group: group.category)


def find_leftovers(
    failure: Failure, captures: Mapping[str, int], stray_samples: tuple[int, ...], samples: int
) -> Leftovers:
    """Finds leftovers among the blocks that were live at a failure.

    Leftovers of Opacus' captures are all but the latest of each module. Other leftovers are blocks of a category of
    which at least three earlier steps, without the last one, left some. Two steps are enough if there were only two and
    both left much of a batch-sized category.

    Args:
        failure: the failure.
        captures: outstanding captures by module, if several forwards in a row began while there were some.
        stray_samples: TrainingShapes.stray_samples.
        samples: the batch size of the forward after the stray ones.
    """
    if stray_samples:
        # If the program has kept an output, what autograd saved is alive as well: one block of each forward.
        groups = tuple(
            group
            for group in failure.block_groups
            if group.category == ACTIVATION_HOOKS
            or (group.category == "activations" and group.blocks > len(stray_samples))
        )
        fraction = sum(stray_samples) / (sum(stray_samples) + samples)
        return Leftovers(groups, fraction, are_captures=True, stray_samples=stray_samples)
    if captures:
        most = max(captures.values())
        groups = tuple(group for group in failure.block_groups if group.category == ACTIVATION_HOOKS)
        return Leftovers(groups, (most - 1) / most, are_captures=True)
    earlier = [
        group
        for group in failure.block_groups
        if group.step < failure.step
        and group.category in _OF_A_STEP
        and (group.step or group.phase not in ("idle", "setup"))
    ]
    due = [group for group in earlier if group.step < failure.step - 1]
    by_category: dict[str, dict[int, int]] = {}
    for (category, step), size in sum_by(due, lambda group: (group.category, group.step)).items():
        by_category.setdefault(category, {})[step] = size
    left = {
        category
        for category, by_step in by_category.items()
        if len(by_step) >= _MIN_STEPS
        or (
            category in _OF_A_BATCH and failure.step == _MIN_STEPS and _first_two_left_much(by_step, failure.live_bytes)
        )
    }
    return Leftovers(tuple(group for group in earlier if group.category in left))


def _first_two_left_much(by_step: Mapping[int, int], live_bytes: int) -> bool:
    return all(by_step.get(step, 0) >= _MIN_SHARE * live_bytes for step in (0, 1))
