# SPDX-License-Identifier: Apache-2.0
"""A failed allocation: the blocks that were live, the run's peaks before it, and the memory of the device.

Some live blocks are leftovers: earlier steps, or forwards without a backward, should have released them. Categories
have the names of reports.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from opacus_memprof.analysis.events import Names
from opacus_memprof.analysis.kept_memory import SEVERAL_FORWARDS
from opacus_memprof.profiles.categories import ACTIVATION_HOOKS, PER_SAMPLE, name_at_failure
from opacus_memprof.profiles.layer_shapes import TrainingShapes
from opacus_memprof.profiles.oom_report import RoomBytes

ACTIVATIONS = ("activations", ACTIVATION_HOOKS)
MARGIN = 0.03  # the part of the reservable memory that predictions leave free
_BLOCK = 2 * 2**20  # the caching allocator takes whole blocks of this size from the device
_SMALL, _MEDIUM, _SEGMENT = 2**20, 10 * 2**20, 20 * 2**20  # up to _SMALL it takes one, from there to _MEDIUM _SEGMENT
_WORTH_A_SUGGESTION = 64 * 2**20
CONTEXT = 600 * 2**20  # the most that this process' own CUDA context takes of `others`
# Blocks of these categories are allocated by a step and freed by the next, unless a reference keeps them alive.
_OF_A_STEP = PER_SAMPLE | {"unattributed", "noise", "summed_gradients", "optimizer_temporaries"}
_MIN_STEPS = 3
# Categories whose size depends on the batch, without inputs, because data loaders load batches ahead.
_OF_A_BATCH = PER_SAMPLE - {"inputs"}
SIZED_BY_CAPTURES = "create_or_accumulate_grad_sample"  # Opacus sizes its result by the largest batch captured
_MANY_PASSES = 8
_EVALUATES = re.compile(r" in (?:\w*_)?(?:eval|valid|test|predict|infer|accura)", re.IGNORECASE)  # a function's name
_MIN_SHARE = 0.02  # of all live bytes, for each of two steps


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
    """Reads an entry of native.failures().

    Blocks that a forward pass allocated count as activations if they are live when memory runs out.
    """
    groups = [
        BlockGroup(**{**group, "category": name_at_failure(group["category"])})
        for group in native["holdings"]
        if group["bytes"]
    ]
    rest = {key: value for key, value in native.items() if key not in ("holdings", "category")}
    return Failure(**rest, category=name_at_failure(native["category"]), block_groups=tuple(groups))


@dataclass(frozen=True)
class RecordedInstant:
    """An instant of the run: live bytes by category."""

    step: int
    phase: str
    categories: Mapping[str, int]


@dataclass(frozen=True)
class History:
    """The peaks of one device.

    Attributes:
        step_peaks: the peak of each physical step that ended before the failure.
        peaks: the peaks of all phases and of all steps, including that of the failed step so far.
        most_activations: the most bytes of activations that were live at once. That is after the peak if an operation's
            temporaries are larger than its saved tensors.
        most_outside_forward: the same outside of forward passes, in which those of two steps can be live.
        most_in_first_step: the same in the first step, which begins without any.
        most_between: the most unattributed bytes outside of phases, with a library's workspace, as calls of other
            models need it. In the first step, which begins without any of the step before.
        workspace_between: the most bytes of such a workspace.
    """

    step_peaks: tuple[RecordedInstant, ...] = ()
    peaks: tuple[RecordedInstant, ...] = ()
    most_activations: int = 0
    most_outside_forward: int = 0
    most_in_first_step: int = 0
    most_between: int = 0
    workspace_between: int = 0


def read_history(replayed: Mapping[str, Any] | None, names: Names | None, failed_step: int) -> History:
    """Reads the history up to the step `failed_step` from one of core.replay's devices. Empty without one."""
    if replayed is None or names is None:
        return History()

    def instant(row: Mapping[str, Any]) -> RecordedInstant:
        return RecordedInstant(row["step"], names.phase(row["phase"]), names.categories(row["categories"]))

    steps = [row for row in replayed["steps"] if row["step"] <= failed_step]
    phases = [row for row in replayed["phases"].values() if row["step"] <= failed_step]
    peaks = tuple(instant(row) for row in [*phases, *steps])
    instants = [*peaks, *(instant(row) for row in replayed["timeline"] if row["step"] <= failed_step)]
    between = [each for each in instants if each.phase == "idle" and each.step == 0]
    return History(
        tuple(instant(row) for row in steps if row["complete"] and row["step"] < failed_step),
        peaks,
        _most_activations(instants),
        _most_activations(each for each in instants if each.phase != "forward"),
        _most_activations(each for each in instants if each.step == 0),
        max((each.categories.get("unattributed", 0) + _workspace(each) for each in between), default=0),
        max(map(_workspace, between), default=0),
    )


def _workspace(instant: RecordedInstant) -> int:
    return instant.categories.get("library_workspace", 0)


def _most_activations(instants: Iterable[RecordedInstant]) -> int:
    return max((sum(each.categories.get(name, 0) for name in ACTIVATIONS) for each in instants), default=0)


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of the device when an allocation failed, in bytes. None: unknown.

    Attributes:
        capacity: requested bytes that fit, with the rounding and fragments of this run, less a margin.
        may_reserve: bytes that the allocator could reserve in total, if other processes stay as they are.
        reserved: bytes that it had reserved.
        allocated: bytes that it had handed out.
        cached: reserved bytes that were not handed out.
        largest_free: the largest free block of `cached`.
        unreserved: bytes that it could still reserve.
        free_segments: bytes that empty_cache would free.
        free_expandable: free bytes in expandable segments.
        others: bytes used by other processes and CUDA itself.
        device: the device's total memory.
        limit: the limit of this process, if lower.
        rounding: allocated bytes divided by requested bytes.
    """

    capacity: int | None
    may_reserve: int | None = None
    reserved: int | None = None
    allocated: int | None = None
    cached: int | None = None
    largest_free: int | None = None
    unreserved: int | None = None
    free_segments: int | None = None
    free_expandable: int | None = None
    others: int | None = None
    device: int | None = None
    limit: int | None = None
    rounding: float = 1.0

    @property
    def fragments(self) -> bool:
        """Whether memory can fragment: the caching allocator splits segments, which do not grow."""
        return self.cached is not None and not self.free_expandable

    def for_report(self) -> RoomBytes:
        return RoomBytes(**{f"{key}_bytes" if key != "rounding" else key: value for key, value in vars(self).items()})


def device_memory_at(failure: Failure) -> DeviceMemory:
    """Returns the device's memory at a failure, from the counts of allocator and device."""
    upstream = failure.upstream
    reserved, allocated = upstream.get("reserved"), upstream.get("allocated")
    free, total, limit = upstream.get("device_free"), upstream.get("device_total"), upstream.get("limit")
    if reserved is None or allocated is None or free is None or total is None:
        return DeviceMemory(capacity=failure.live_bytes if limit is None else limit, limit=limit)
    used = allocated + (upstream.get("pending") or 0)
    may_reserve = reserved + free if limit is None else min(limit, reserved + free)
    rounding = max(used / max(failure.live_bytes, 1), 1.0)
    wasted = (reserved - used) / max(reserved, 1)
    return DeviceMemory(
        capacity=int(may_reserve * (1 - MARGIN) * (1 - wasted) / rounding),
        may_reserve=may_reserve,
        reserved=reserved,
        allocated=allocated,
        cached=reserved - used,
        largest_free=upstream.get("largest_free"),
        unreserved=max(may_reserve - reserved, 0) // _BLOCK * _BLOCK,
        free_segments=upstream.get("free_segments"),
        free_expandable=upstream.get("free_expandable"),
        others=max(total - free - reserved, 0),
        device=total,
        limit=limit if limit is not None and limit < total else None,
        rounding=rounding,
    )


def was_free_again(memory: DeviceMemory, failure: Failure) -> bool:
    """Returns whether the device had the memory that failed, when it was asked a moment later.

    The allocator tries with all of the device's free memory before it fails: another process has freed some since.
    """
    size = int(failure.requested * memory.rounding)
    segment = _BLOCK if size <= _SMALL else _SEGMENT if size < _MEDIUM else -(-size // _BLOCK) * _BLOCK
    return memory.unreserved is not None and segment <= memory.unreserved


def is_fragmented(memory: DeviceMemory, failure: Failure, needed: int) -> bool:
    """Returns whether cached and unreserved memory would have been enough together, but no single block was.

    Args:
        memory: of the device.
        failure: the failure.
        needed: the peak of the step. A few fragments count only if this fits.
    """
    if memory.cached is None or memory.unreserved is None or was_free_again(memory, failure):
        return False
    if memory.cached < _WORTH_A_SUGGESTION and needed > (memory.capacity or 0):
        return False
    return memory.cached + memory.unreserved >= failure.requested * memory.rounding and not memory.free_expandable


def is_crowded_by_others(memory: DeviceMemory) -> bool:
    """Returns whether other processes use much of the device, and no lower limit applies to this one."""
    return (
        memory.others is not None
        and memory.device is not None
        and memory.others - CONTEXT >= max(_WORTH_A_SUGGESTION, memory.device // 50)
        and memory.may_reserve is not None
        and memory.limit is None
    )


@dataclass(frozen=True)
class Leftovers:
    """Blocks that should have been released. Sizes are in bytes.

    Attributes:
        block_groups: live blocks, of which `fraction` are leftovers.
        are_captures: they are Opacus' captures, which no backward has released. Otherwise references keep them alive.
        stray_samples: the batch sizes of the forwards that captured them, if Opacus sizes per-sample gradients by one
            of these.
        backward_passes: the passes of the failed step whose gradients they are, as of a program that keeps the
            gradients of each sample in a list; otherwise 0.
        forward_passes: the forward passes in a row whose graphs they are, without a backward pass; otherwise 0.
    """

    block_groups: tuple[BlockGroup, ...] = ()
    fraction: float = 1.0
    are_captures: bool = False
    stray_samples: tuple[int, ...] = ()
    backward_passes: int = 0
    forward_passes: int = 0

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
        """Returns the leftovers of steps before `step`, by category."""
        if self.are_captures or self.forward_passes:
            return {}
        return _by_category(tuple(group for group in self.block_groups if group.step < step))


def _by_category(block_groups: tuple[BlockGroup, ...]) -> dict[str, int]:
    return sum_by(block_groups, lambda group: group.category)


def find_evaluation(failure: Failure, shapes: TrainingShapes) -> tuple[int, bool] | None:
    """Returns the samples of the evaluation in which memory ran out, and whether it records a graph; else None.

    A program may evaluate in training mode: then the names of its functions tell, in the lines that made activations.
    """
    if failure.phase not in ("forward", "idle"):
        return None
    if shapes.evaluation is not None or shapes.waiting is None:  # no backward pass: it is the first step
        return shapes.evaluation
    activations = [group for group in failure.block_groups if group.category in ACTIVATIONS]
    evaluated = [group for group in activations if _EVALUATES.search(group.op)]
    samples = shapes.batch_size_in(failure.step)
    is_one = 2 * sum(group.bytes for group in evaluated) > sum(group.bytes for group in activations)
    return (samples, True) if is_one and samples else None


def made_in_step(failure: Failure, shapes: TrainingShapes) -> int:
    """Returns the unattributed bytes that the step has made outside of the model, which grow with its batch.

    These are what a program computes from the batch itself, or by another model, such as a teacher or a generator. What
    a variable keeps of the step before is part of it.
    """
    samples = shapes.batch_size_in(failure.step)
    unattributed = [group for group in failure.block_groups if group.category == "unattributed"]
    kept = {group.op for group in unattributed if group.op and group.step < failure.step - 1}  # by lines of the program
    recent = [group for group in unattributed if group.phase == "idle" and group.step >= failure.step - 1]
    groups = [group for group in recent if group.op not in kept]
    made = sum(group.bytes for group in groups if samples and group.largest % samples == 0)
    if failure.step < 2:  # step 0 has what was there before the first batch, too
        live = sum(group.bytes for group in unattributed)
        before = live if shapes.made_before is None else shapes.made_before.get(failure.device, 0)
        made = min(made, live - before)
    return max(made - shapes.unclaimed_parameters(), 0)


def find_leftovers(
    failure: Failure,
    captures: Mapping[str, int],
    stray_samples: tuple[int, ...],
    samples: int,
    weights: Set[int] = frozenset(),
    waiting: int = 0,
) -> Leftovers:
    """Finds leftovers among the blocks that were live at a failure.

    Leftovers of Opacus' captures are all but the latest of each module. Other leftovers are blocks of a category of
    which at least three earlier steps, without the last one, left some. Two steps are enough if there were only two and
    both left much of a batch-sized category. Gradients of many backward passes of the failed step are some, too.

    Args:
        failure: the failure.
        captures: outstanding captures by module, if several forwards in a row began while there were some.
        stray_samples: TrainingShapes.stray_samples.
        samples: the batch size of the forward after the stray ones.
        weights: bytes of the trained weights.
        waiting: forward passes in a row that recorded graphs, without a backward pass.
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
    if waiting > SEVERAL_FORWARDS:
        kept = tuple(
            group
            for group in failure.block_groups
            if group.category in ("activations", "inputs")
            and group.step == failure.step
            and group.blocks >= waiting - 1
        )
        if 2 * sum(group.bytes for group in kept) > failure.live_bytes:
            return Leftovers(kept, (waiting - 1) / waiting, forward_passes=waiting)
    kept = tuple(group for group in failure.block_groups if _is_of_many_passes(group, failure.step, weights))
    if 2 * sum(group.bytes for group in kept) > failure.live_bytes:
        passes = max(group.bytes // group.largest for group in kept)
        return Leftovers(kept, (passes - 1) / passes, backward_passes=passes)
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


def _is_of_many_passes(group: BlockGroup, step: int, weights: Set[int]) -> bool:
    """Returns whether a group has gradients of many backward passes of a step, or what a line has made of them."""
    are_gradients = group.category in ("backward_temporaries", "unattributed") and group.largest in weights
    return are_gradients and group.step == step and group.bytes // group.largest >= _MANY_PASSES


def _first_two_left_much(by_step: Mapping[int, int], live_bytes: int) -> bool:
    return all(by_step.get(step, 0) >= _MIN_SHARE * live_bytes for step in (0, 1))
