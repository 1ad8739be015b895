# SPDX-License-Identifier: Apache-2.0
"""Suggests changes that make a run fit, or that lower the peak of a run that had enough memory.

Each has the bytes that it saves and how they were computed. The peak of a run that had enough memory is read as if the
run had ended there, with a failed allocation.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from opacus_memprof.analysis.events import Names
from opacus_memprof.analysis.kept_memory import model_of
from opacus_memprof.analysis.oom.advice import changes, training, waste
from opacus_memprof.analysis.oom.advice.suggestion import COMBINED, DEFECT, Suggestion
from opacus_memprof.analysis.oom.estimate import estimate_step
from opacus_memprof.analysis.oom.failure import ACTIVATIONS, BlockGroup, DeviceMemory, Failure, Leftovers, read_history
from opacus_memprof.analysis.oom.predict import Case
from opacus_memprof.profiles.layer_shapes import TrainingShapes
from opacus_memprof.profiles.oom_report import needs_edit
from opacus_memprof.profiles.profile import Block, Device, Improvement, Peak, PhasePeak

__all__ = ["Suggestion", "advise"]

ADVISERS: tuple[Callable[[Case], Iterator[Suggestion]], ...] = (
    waste.release_leftovers,
    waste.clear_other_models,
    waste.release_models,
    waste.move_batches_in_turn,
    waste.split_gradients_by_hand,
    waste.evaluate_without_graph,
    waste.call_without_graph,
    waste.run_again,
    waste.expandable_segments,
    waste.other_processes,
    waste.drop_unused_gradients,
    waste.set_gradients_to_none,
    waste.clear_before_forward,
    changes.norms_without_squares,
    changes.adopted_samples,
    changes.clip_each_batch,
    changes.physical_batch,
    changes.another_mode,
    training.change_training,
)
# For gradients of several batches that are accumulated for one step: how many more would follow is unknown.
_ACCUMULATING_ADVISERS: tuple[Callable[[Case], Iterator[Suggestion]], ...] = (
    waste.release_leftovers,
    waste.clear_other_models,
    waste.release_models,
    waste.run_again,
    changes.clip_each_batch,
    changes.another_mode,
)
_WORTHWHILE = 0.02  # of the peak
# Improvements: they change neither the result of the training nor its batch.
_IMPROVING_ADVISERS: tuple[Callable[[Case], Iterator[Suggestion]], ...] = (
    waste.release_models,
    waste.evaluate_without_graph,
    waste.call_without_graph,
    waste.drop_unused_gradients,
    waste.set_gradients_to_none,
    waste.clear_before_forward,
    changes.norms_without_squares,
    changes.adopted_samples,
    changes.clip_each_batch,
    changes.another_mode,
    training.keep_fewer_activations,
)
_FEWER_ACTIVATIONS = {"checkpoint", "dtype", "fused_attention", "no_grad"}  # kinds of actions
_PARAMETERS = "model_parameters"
_OF_PRIVACY = ("per_sample_gradients", "gradients", "summed_gradients")


def advise(case: Case) -> list[Suggestion]:
    """Returns all suggestions that save memory, in the order in which they are shown.

    First come suggestions that fit, smallest change of the program first. Suggestions that fit tightly follow in the
    same order; if they remove a defect, they stand among the first. The others come last, largest saving first.
    """
    advisers = _ACCUMULATING_ADVISERS if case.shapes.accumulated > 1 else ADVISERS
    found = [each for adviser in advisers for each in adviser(case) if each.saved > 0]
    # Adapters and shorter sequences change what is trained, so they come after combinations.
    if not any(each.fits is not False and not each.is_tight and each.change < COMBINED for each in found):
        found += training.combine(case)
    return sorted(
        found,
        key=lambda each: (
            each.fits is False,
            each.is_tight and each.change != DEFECT,
            each.change if each.fits is not False else 0,
            0 if each.change == COMBINED else -each.saved,  # combinations come with the smallest first
        ),
    )


def find_improvements(
    name: str, device: Device, replayed: Mapping[str, Any], names: Names, shapes: TrainingShapes
) -> list[Improvement]:
    """Returns changes that lower the peak, the lowest predicted peak first. Nothing if no training was followed.

    Args:
        name: the device, such as "cuda:0".
        device: its entry in profile.json.
        replayed: its entry in core.replay's result.
        names: translates ids.
        shapes: what is being trained.
    """
    peak = device.peak
    if not device.steps or not peak.modules:
        return []
    failure, shapes = _peak_as_failure(name, peak), shapes.at_instant()
    history = read_history(replayed, names, device.steps[-1].step + 1)
    nothing = Leftovers()
    step = estimate_step(failure, shapes, history, nothing)
    if step is None:
        return []
    samples = shapes.batch_size_in(peak.step)
    case = Case(failure, shapes, history, DeviceMemory(capacity=None), step, samples, nothing)
    between = [device.phases[phase] for phase in ("setup", "idle") if phase in device.phases]
    floors = {
        fewer_activations: max((_kept(instant, fewer_activations=fewer_activations) for instant in between), default=0)
        for fewer_activations in (False, True)
    }
    found = [
        Improvement(
            each.title,
            each.code,
            max(each.peak, floors[not _FEWER_ACTIVATIONS.isdisjoint(action.kind for action in each.actions)]),
            each.computed,
            needs_edit(each.actions),
        )
        for adviser in _IMPROVING_ADVISERS
        for each in adviser(case)
    ]
    worthwhile = [each for each in found if each.predicted_peak_bytes < (1 - _WORTHWHILE) * peak.requested_bytes]
    return sorted(worthwhile, key=lambda each: each.predicted_peak_bytes)


def _kept(instant: PhasePeak, *, fewer_activations: bool) -> int:
    """Returns the bytes of an instant between the phases of a step that remain with another mode, or fewer activations.

    The loss is usually computed at such an instant, with all activations of the forward pass.
    """
    freed = (*_OF_PRIVACY, *(("activations", "activation_hooks") if fewer_activations else ()))
    return instant.peak_bytes - sum(instant.categories.get(category, 0) for category in freed)


def _peak_as_failure(name: str, peak: Peak) -> Failure:
    """Reads the peak as if an allocation of no bytes had failed there."""
    largest: dict[tuple[str, str], Block] = {}
    for block in peak.largest_blocks:  # the largest first
        largest.setdefault((block.module, block.category), block)
    # Models are told apart by the steps in which they were made: known of all of them, or of none.
    parameters = [module for module, sizes in peak.modules.items() if _PARAMETERS in sizes]
    made_in = {
        model_of(module)[1]: block.step for (module, category), block in largest.items() if category == _PARAMETERS
    }
    if not made_in.keys() >= {model_of(module)[1] for module in parameters}:
        made_in = {}
    earlier: dict[tuple[str, str], list[Block]] = {}
    for block in peak.largest_blocks:
        if block.category in ACTIVATIONS and block.step < peak.step:
            earlier.setdefault((block.module, block.category), []).append(block)
    groups = [
        BlockGroup(
            bytes=size - sum(block.bytes for block in earlier.get((module, category), ())),
            blocks=1,
            largest=largest[module, category].bytes if (module, category) in largest else size,
            category=category,
            module=module,
            op="",
            phase=peak.phase,
            step=made_in.get(model_of(module)[1], peak.step) if category == _PARAMETERS else peak.step,
        )
        for module, sizes in peak.modules.items()
        for category, size in sizes.items()
    ]
    groups += [
        BlockGroup(block.bytes, 1, block.bytes, category, module, "", block.phase, block.step)
        for (module, category), blocks in earlier.items()
        for block in blocks
    ]
    return Failure(
        number=0,
        device=name,
        requested=0,
        category="unattributed",
        module="",
        op="",
        phase=peak.phase,
        step=peak.step,
        logical_step=peak.logical_step or 0,
        unix_ns=peak.unix_ns,
        block_groups=tuple(sorted((group for group in groups if group.bytes), key=lambda group: -group.bytes)),
        upstream={},
    )
