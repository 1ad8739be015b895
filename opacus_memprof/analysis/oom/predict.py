# SPDX-License-Identifier: Apache-2.0
"""Predicts the peak of a whole step, unchanged and after a change.

In the run's own mode, the prediction uses what was recorded: the failure and the peaks before it, with the categories
that grow with the batch scaled to the number of samples. From shapes (step.Step) come only the rest of a step that has
never been completed, and steps in another mode.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from opacus_memprof.analysis.oom.failure import (
    ACTIVATIONS,
    SIZED_BY_CAPTURES,
    BlockGroup,
    DeviceMemory,
    Failure,
    History,
    Leftovers,
    RecordedInstant,
    sum_by,
)
from opacus_memprof.analysis.oom.step import PER_SAMPLE_MODES, Instant, Step
from opacus_memprof.profiles.categories import PER_SAMPLE
from opacus_memprof.profiles.layer_shapes import TrainingShapes

Gradients = Literal["kept", "zeroed", "dropped", "early"]
_WORKSPACE, _UNATTRIBUTED, _TEMPORARIES = "library_workspace", "unattributed", "forward_temporaries"
_PHASE_ORDER = ("forward", "backward", "second_backward", "clip", "noise", "optimizer_step")


@dataclass(frozen=True)
class Case:
    """All that is known of a failure.

    Attributes:
        failure: the allocation that failed.
        shapes: of the model.
        history: of the run before.
        memory: of the device.
        step: the run's own; None if no model or no batch was seen.
        samples: of the physical batch; None if it was not seen.
        leftovers: of earlier steps or forwards.
        freed: the part of `made`, at the failure, that a changed program does not make.
        forward: the most bytes that the forward pass of an evaluation without graph holds at once, if the failure is in
            one and they are known; else 0.
    """

    failure: Failure
    shapes: TrainingShapes
    history: History
    memory: DeviceMemory
    step: Step | None
    samples: int | None
    leftovers: Leftovers
    freed: int = 0
    forward: int = 0

    @property
    def made(self) -> int:
        """The bytes that the step has made outside of the model, and that grow with its batch."""
        return self.freed + (0 if self.step is None else self.step.made)

    @property
    def most_samples(self) -> int | None:
        """The samples of the largest batch that is likely to come: at least those of the failed step."""
        ahead = self.shapes.most_samples if self.shapes.mode else None
        return self.samples if self.samples is None else max(self.samples, ahead or 0)

    @property
    def is_drawn(self) -> bool:
        """Whether batches are drawn by Poisson sampling, so that their sizes differ."""
        return bool(self.shapes.mode) and self.shapes.draws_poisson

    def fits(self, size: int) -> bool | None:
        """Returns whether a peak of `size` bytes fits; None if the capacity is unknown."""
        return None if self.memory.capacity is None else size <= self.memory.capacity

    def largest_block(self, n: int) -> int:
        """Returns the bytes of the largest block that grows with the batch, with n samples."""
        scaled = [group.largest for group in self.failure.block_groups if group.category in PER_SAMPLE]
        if self.failure.category in PER_SAMPLE:
            scaled.append(self.failure.requested)
        return max(scaled, default=0) * n // max(self.samples or 1, 1)

    def peak(
        self,
        n: int | None = None,
        *,
        with_leftovers: bool = True,
        gradients: Gradients = "kept",
        is_part: bool = False,
    ) -> Instant:
        """Returns the peak of a step in the run's own mode.

        Args:
            n: samples of the physical batch. Default: `most_samples`.
            with_leftovers: whether leftovers stay.
            gradients: p.grad outlives zero_grad if it does so now ("kept"), is dropped by it ("zeroed"), or is dropped
                as soon as autograd has accumulated it ("dropped"). "early": what a step leaves is cleared before the
                next forward pass.
            is_part: the program without Opacus adds up the gradients of such batches, which are live in later ones.
        """
        n = self.most_samples if n is None else n
        case = replace(self, shapes=replace(self.shapes, accumulates=True)) if is_part else self
        if is_part and self.step is not None:
            case = replace(case, step=self.step.with_changes(keeps_gradients=True))
        return max(case._instants(n, with_leftovers, gradients), key=lambda instant: instant.bytes)

    def peak_of(
        self, step: Step, n: int | None = None, *, same_forward: bool = True, accumulates: bool = False
    ) -> Instant:
        """Returns the peak of another step, with leftovers.

        Args:
            step: the step.
            n: samples of the physical batch. Default: `most_samples`.
            same_forward: its forward pass takes what was recorded.
            accumulates: whether clipped sums of other physical batches are live, as with fewer samples they are.
        """
        samples = self.samples or 1
        n = self.most_samples if n is None else n
        accumulates |= n is not None and n < samples
        instants = list(step.instants(samples if n is None else n, accumulates=accumulates))
        if same_forward:
            instants += self._forward_instants(step, n, accumulates)
        instant = max(instants, key=lambda each: each.bytes)
        return replace(instant, parts={**instant.parts, **self._leftover_part()})

    def _leftover_part(self) -> dict[str, int]:
        return {"left_behind": self.leftovers.bytes} if self.leftovers.bytes else {}

    def _forward_instants(self, step: Step, n: int | None, accumulates: bool) -> Iterator[Instant]:
        """Yields the recorded peaks of forward passes, which are the same in every mode."""
        for recorded in self.history.peaks:
            if recorded.phase == "forward" and not (self.leftovers.bytes and recorded.step == self.failure.step):
                sizes = self._scale_instant(recorded, n)
                _subtract(sizes, self.leftovers.from_before(recorded.step))
                # An evaluation before zero_grad has those of the step before it.
                evaluates = self.shapes.evaluation is not None and self.shapes.accumulated == 1
                if not evaluates or step.mode not in PER_SAMPLE_MODES:
                    sizes["per_sample_gradients"] = 0
                sizes |= {"optimizer_states": step.states, **step.left_in_forward(n or self.samples or step.samples)}
                for name in ("gradients", "optimizer_states"):
                    sizes[name] += step.others.get(name, 0)
                if accumulates and step.mode:
                    sizes["summed_gradients"] = step.trained
                yield Instant("forward", "", sizes)

    def _scale_instant(self, recorded: RecordedInstant, n: int | None) -> dict[str, int]:
        """Returns the bytes of a recorded instant with n samples (default: as many as in the failed step)."""
        wanted = self.samples if n is None else n
        recorded_samples = self.shapes.batch_size_in(recorded.step) or wanted
        ratio = wanted / recorded_samples if wanted and recorded_samples else 1.0
        sizes = {name: int(size * ratio) if name in PER_SAMPLE else size for name, size in recorded.categories.items()}
        if self.made:
            live = sum(group.bytes for group in self.failure.block_groups if group.category == _UNATTRIBUTED)
            made = max(sizes.get(_UNATTRIBUTED, 0) - (live - self.made), 0)
            kept = ratio * (self.made - self.freed) / self.made
            sizes[_UNATTRIBUTED] = sizes.get(_UNATTRIBUTED, 0) + int(made * (kept - 1))
        if _WORKSPACE in sizes:  # cuBLAS' workspace, which lives on, has one size; others grow with their operands
            live = sum(group.bytes for group in self.failure.block_groups if group.category == _WORKSPACE)
            fixed = min(live, sizes[_WORKSPACE])
            sizes[_WORKSPACE] = fixed + int((sizes[_WORKSPACE] - fixed) * ratio)
        return sizes

    # --- the run's own mode ---

    def _instants(self, n: int | None, with_leftovers: bool, gradients: Gradients) -> Iterator[Instant]:
        samples = self.samples
        accumulates = n is not None and samples is not None and n < samples
        if not with_leftovers and self.leftovers.stray_samples and self.step is not None:
            yield from self._instants_without_strays(self.step, self.leftovers.stray_samples)
            return
        yield self._failure_instant(n, with_leftovers, gradients, accumulates)
        for recorded in self.history.peaks:
            if not with_leftovers and self.leftovers.bytes and recorded.step == self.failure.step:
                continue  # the failure's instant is the same, and tells what of it is left over
            sizes = self._scale_instant(recorded, n)
            if not with_leftovers:
                _subtract(sizes, self.leftovers.from_before(recorded.step))
            yield Instant(recorded.phase, "", self._in_later_step(sizes, n, recorded.phase, accumulates, gradients))
        if self.step is not None and not self.history.step_peaks:
            yield from self._remaining_instants(self.step, n, with_leftovers, gradients, accumulates)

    def _instants_without_strays(self, step: Step, stray_samples: tuple[int, ...]) -> Iterator[Instant]:
        """Yields the instants of the step after stray forwards are removed from the program.

        Per-sample gradients then have the size of the step's own batch. The stray forwards run without saving tensors:
        they need an operation's input and output, and as much again for tensors that its caller refers to.
        """
        yield from step.instants(step.samples)
        widest = max((layer.forward.input_bytes + 2 * layer.forward.output_bytes for layer in step.layers), default=0)
        temporaries = widest * max(stray_samples) // step.samples
        for recorded in self.history.peaks:
            if recorded.phase == "forward" and recorded.step == self.failure.step:
                parts = {name: size for name, size in recorded.categories.items() if name not in ACTIVATIONS}
                yield Instant("forward", "", {**parts, "forward_temporaries": temporaries})

    def _failure_instant(self, n: int | None, with_leftovers: bool, gradients: Gradients, accumulates: bool) -> Instant:
        """Returns the instant of the failure, including the requested bytes."""
        failure = self.failure
        ratio = 1.0 if n is None or not self.samples else n / self.samples
        sizes: dict[str, float] = {}
        for group in failure.block_groups:
            grows = self._grows_with_batch(group.category, group.module, group.op, group.largest)
            sizes[group.category] = sizes.get(group.category, 0) + group.bytes * (ratio if grows else 1)
        for category, size in self.leftovers.by_category.items():
            sizes[category] -= size * ratio  # leftovers do not grow
            sizes["left_behind"] = sizes.get("left_behind", 0) + (size if with_leftovers else 0)
        if self.made:
            sizes[_UNATTRIBUTED] += (self.made - self.freed) * ratio - self.made
        grows = self._grows_with_batch(failure.category, failure.module, failure.op, failure.requested)
        sizes[failure.category] = sizes.get(failure.category, 0) + failure.requested * (ratio if grows else 1)
        parts = {category: int(size) for category, size in sizes.items()}
        if self.forward:  # what it holds so far, and what failed, are part of its peak
            own = sum_by(self._in_forward(), lambda group: group.category)
            _subtract(parts, own)
            parts[failure.category] -= failure.requested
            parts[_TEMPORARIES] = parts.get(_TEMPORARIES, 0) + self.forward
        return Instant(
            failure.phase, failure.module, self._in_later_step(parts, n, failure.phase, accumulates, gradients)
        )

    def _in_forward(self) -> list[BlockGroup]:
        """Returns the blocks that the forward pass that failed has made."""
        of_step = [group for group in self.failure.block_groups if group.step == self.failure.step]
        return [
            group for group in of_step if group.phase == "forward" and group.category in (*ACTIVATIONS, _TEMPORARIES)
        ]

    def _in_later_step(
        self, sizes: dict[str, int], n: int | None, phase: str, accumulates: bool, gradients: Gradients
    ) -> dict[str, int]:
        """Returns the same instant in a later step, where optimizer states exist.

        What outlives zero_grad, or is cleared late, exists then, too, and, if the batch is part of a logical batch,
        clipped sums.
        """
        if phase not in _PHASE_ORDER:
            return sizes
        # No zero_grad of this model drops those of others.
        others = 0 if self.step is None else self.step.others.get("gradients", 0)
        late = self.step if phase == "forward" and self.step is not None and self.step.clears_late else None
        if late is not None and gradients == "early":
            kept = late.trained if late.keeps_gradients else 0
            sizes |= {"per_sample_gradients": 0, "summed_gradients": 0, "gradients": kept + others}
        if self.step is not None and not self.history.step_peaks:
            sizes = _with_states(sizes, self.step.states + self.step.others.get("optimizer_states", 0))
            kept = self.step.trained if self.step.keeps_gradients and gradients == "kept" else 0
            sizes["gradients"] = max(sizes.get("gradients", 0), kept + others)
            if late is not None and gradients != "early":
                left = late.left_in_forward(n or late.samples)
                sizes |= {name: max(size, sizes.get(name, 0)) for name, size in left.items()}
        else:  # states can have been made after the instant, as a generator's after the discriminator's first step
            groups = [group for group in self.failure.block_groups if group.category == "optimizer_states"]
            sizes = _with_states(sizes, sum(group.bytes for group in groups))
            failed = self.failure.phase
            is_after = failed in _PHASE_ORDER and _PHASE_ORDER.index(phase) >= _PHASE_ORDER.index(failed)
            if self.step is not None and is_after:  # those of its gradients that are live at the failure stay
                own = min(sizes.get("gradients", 0), self.step.trained)
                sizes["gradients"] = max(sizes.get("gradients", 0), own + others)
        if accumulates and self.shapes.mode:
            sizes["summed_gradients"] = max(sizes.get("summed_gradients", 0), self.shapes.trained_bytes)
        elif accumulates and self.shapes.accumulates:
            sizes["gradients"] = max(sizes.get("gradients", 0), self.shapes.trained_bytes + others)
        if late is not None:
            return sizes
        if (gradients == "dropped" and phase in _PHASE_ORDER[:4]) or (gradients == "zeroed" and phase == "forward"):
            sizes["gradients"] = others
        return sizes

    def _remaining_instants(
        self, step: Step, n: int | None, with_leftovers: bool, gradients: Gradients, accumulates: bool
    ) -> Iterator[Instant]:
        """Yields the instants of the failed step that come after the failure."""
        failure = self.failure
        reached_phase = _PHASE_ORDER.index(failure.phase) if failure.phase in _PHASE_ORDER else -1
        order = [layer.name for layer in step.layers]
        reached_layer = order.index(failure.module) if failure.module in order else len(order)
        of_step = [group for group in failure.block_groups if (group.phase, group.step) == ("backward", failure.step)]
        has_begun = any(name in order for name in (failure.module, *(group.module for group in of_step)))  # of a layer

        def is_over(instant: Instant) -> bool:
            """Returns whether an instant of the phase that failed comes before the failure."""
            if instant.is_loss or "backward" not in instant.phase:
                return instant.is_loss and has_begun
            name = instant.module  # of a layer, or of several layers that are sampled together
            together = (layer.name for layer in step.layers if layer.module.sampled_in == name)
            return order.index(name if name in order else next(together)) > reached_layer

        changed = step.with_changes(
            keeps_gradients=step.keeps_gradients and gradients in ("kept", "early"),
            drops_gradients=gradients == "dropped",
            clears_late=step.clears_late and gradients != "early",
        )
        leftovers = self._leftover_part() if with_leftovers else {}
        for instant in changed.instants(n or step.samples, accumulates=accumulates):
            if instant.phase in _PHASE_ORDER:  # otherwise the next step begins
                phase = _PHASE_ORDER.index(instant.phase)
                if phase < reached_phase or (phase == reached_phase and is_over(instant)):
                    continue
            yield replace(instant, parts={**instant.parts, **leftovers})

    def _grows_with_batch(self, category: str, module: str, op: str, size: int) -> bool:
        """Returns whether a block of this size grows with the batch.

        It does not if Opacus sizes it by a stray forward's batch.
        """
        sized_by_stray = bool(self.leftovers.stray_samples) and op == SIZED_BY_CAPTURES
        return category in PER_SAMPLE and not sized_by_stray and not self._is_gradient(module, size)

    def _is_gradient(self, module: str, size: int) -> bool:
        """Returns whether a block has the size of the module's weight.

        Then it is the weight's gradient before accumulation, whatever its category is.
        """
        shape = self.shapes.modules.get(module)
        return shape is not None and shape.weight > 0 and size == shape.weight_bytes


def _subtract(sizes: dict[str, int], others: Mapping[str, int]) -> None:
    for category, size in others.items():
        sizes[category] = sizes.get(category, 0) - size


def _with_states(sizes: dict[str, int], states: int) -> dict[str, int]:
    """Returns the sizes with all optimizer states.

    In the step that creates them, new states count as its temporaries.
    """
    present, temporaries = sizes.get("optimizer_states", 0), sizes.get("optimizer_temporaries", 0)
    new = min(max(states - present, 0), temporaries)
    return {**sizes, "optimizer_states": max(present, states), "optimizer_temporaries": temporaries - new}
