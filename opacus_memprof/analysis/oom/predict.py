# SPDX-License-Identifier: Apache-2.0
"""The peak of a whole step, as it is and after a change.

As long as the mode stays, what the run has shown counts: the failure itself and the highest instants before it, their
scaling categories times samples then over samples now. Only what a step that has never ended still needs comes from
its shapes (step.Step), and all of a step in another mode.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from opacus_memprof.analysis.oom.failure import Failure
from opacus_memprof.analysis.oom.history import History, Moment
from opacus_memprof.analysis.oom.left import Left
from opacus_memprof.analysis.oom.room import Room
from opacus_memprof.analysis.oom.step import Instant, Step
from opacus_memprof.profiles.categories import PER_SAMPLE
from opacus_memprof.workload import Workload

Gradients = Literal["kept", "zeroed", "dropped"]
_LENT = "library_workspace"
_ORDER = ("forward", "backward", "second_backward", "clip", "noise", "optimizer_step")


@dataclass(frozen=True)
class Case:
    """All that is known of one failure.

    Attributes:
        step: the run's own; None where no model and no batch were seen.
        samples: of the physical batch; None where it was not seen.
        left: what steps or forwards before have left behind.
    """

    failure: Failure
    workload: Workload
    history: History
    room: Room
    step: Step | None
    samples: int | None
    left: Left

    def fits(self, size: int) -> bool | None:
        return None if self.room.capacity is None else size <= self.room.capacity

    def largest_block(self, n: int) -> int:
        """Of what grows with the batch, with n samples."""
        scaled = [one.largest for one in self.failure.holdings if one.category in PER_SAMPLE]
        if self.failure.category in PER_SAMPLE:
            scaled.append(self.failure.requested)
        return max(scaled, default=0) * n // max(self.samples or 1, 1)

    def peak(self, n: int | None = None, *, left: bool = True, gradients: Gradients = "kept") -> Instant:
        """The peak of the run's own mode with n samples at a time (None: as many as now).

        Args:
            left: what earlier steps have left behind stays; False: it is let go.
            gradients: p.grad outlives zero_grad as far as it does now ("kept"), goes with it ("zeroed"), or goes as
                soon as autograd has made it ("dropped").
        """
        return max(self._instants(n, left, gradients), key=lambda instant: instant.bytes)

    def changed(self, step: Step, n: int | None = None) -> Instant:
        """The peak of another step, with what earlier steps have left behind."""
        now = self.samples or 1
        accumulates = n is not None and n < now
        rest = {"left_behind": self.left.bytes} if self.left.bytes else {}
        instants = [
            *step.instants(now if n is None else n, accumulates=accumulates),
            *self._forwards(step, n, accumulates),
        ]
        instant = max(instants, key=lambda one: one.bytes)
        return Instant(instant.phase, instant.module, {**instant.parts, **rest})

    def _forwards(self, step: Step, n: int | None, accumulates: bool) -> Iterator[Instant]:
        """The forward passes that the run has shown: they are the same in every mode."""
        before = step.trained if step.keeps_gradients else 0
        for moment in self.history.moments:
            if moment.phase == "forward" and not (self.left.bytes and moment.step == self.failure.step):
                sizes = self._at(moment, n)
                for category, size in self.left.before(moment.step).items():
                    sizes[category] = sizes.get(category, 0) - size
                sizes |= {"optimizer_states": step.states, "gradients": before, "per_sample_gradients": 0}
                if accumulates and step.mode:
                    sizes["summed_gradients"] = step.trained
                yield Instant("forward", "", sizes)

    def _at(self, moment: Moment, n: int | None) -> dict[str, int]:
        """The moment's bytes with n samples (None: as many as now)."""
        wanted = self.samples if n is None else n
        then = self.workload.batch_of(moment.step) or wanted
        share = wanted / then if wanted and then else 1.0
        sizes = {name: int(size * share) if name in PER_SAMPLE else size for name, size in moment.categories.items()}
        if _LENT in sizes:  # what is live between operations is cuBLAS', of one size; the rest grows with operands
            kept = min(sum(one.bytes for one in self.failure.holdings if one.category == _LENT), sizes[_LENT])
            sizes[_LENT] = kept + int((sizes[_LENT] - kept) * share)
        return sizes

    # --- as it is ---

    def _instants(self, n: int | None, left: bool, gradients: Gradients) -> Iterator[Instant]:
        samples = self.samples
        accumulates = n is not None and samples is not None and n < samples
        yield self._failed(n, left, gradients, accumulates)
        for moment in self.history.moments:
            if not left and self.left.bytes and moment.step == self.failure.step:
                continue  # the failure says the same, and what of it is left behind
            sizes = self._at(moment, n)
            for category, size in self.left.before(moment.step).items() if not left else ():
                sizes[category] = sizes.get(category, 0) - size
            yield Instant(moment.phase, "", self._steady(sizes, moment.phase, accumulates, gradients))
        if self.step is not None and not self.history.steps:
            yield from self._to_come(self.step, n, left, gradients, accumulates)

    def _failed(self, n: int | None, left: bool, gradients: Gradients, accumulates: bool) -> Instant:
        """The failure itself, with what was asked for."""
        failure = self.failure
        share = 1.0 if n is None or not self.samples else n / self.samples
        sizes: dict[str, float] = {}
        for holding in failure.holdings:
            scaled = holding.category in PER_SAMPLE and not self._of_parameters(holding.module, holding.largest)
            sizes[holding.category] = sizes.get(holding.category, 0) + holding.bytes * (share if scaled else 1)
        for category, size in self.left.by_category.items():
            sizes[category] -= size * share  # it does not scale
            sizes["left_behind"] = sizes.get("left_behind", 0) + (size if left else 0)
        scaled = failure.category in PER_SAMPLE and not self._of_parameters(failure.module, failure.requested)
        sizes[failure.category] = sizes.get(failure.category, 0) + failure.requested * (share if scaled else 1)
        whole = {category: int(size) for category, size in sizes.items()}
        return Instant(failure.phase, failure.module, self._steady(whole, failure.phase, accumulates, gradients))

    def _steady(self, sizes: dict[str, int], phase: str, accumulates: bool, gradients: Gradients) -> dict[str, int]:
        """The same instant in a later step: optimizer states are there, and gradients that outlive zero_grad; in a
        part of a logical batch, clipped sums as well."""
        if phase not in _ORDER:
            return sizes
        if self.step is not None and not self.history.steps:
            sizes = _with_states(sizes, self.step.states)
            if self.step.keeps_gradients and gradients == "kept":
                sizes["gradients"] = max(sizes.get("gradients", 0), self.step.trained)
        if accumulates and self.workload.mode:
            sizes["summed_gradients"] = max(sizes.get("summed_gradients", 0), self.workload.trained_bytes)
        if gradients == "dropped" and phase in _ORDER[:4]:
            sizes.pop("gradients", None)
        if gradients == "zeroed" and phase == "forward":
            sizes.pop("gradients", None)
        return sizes

    def _to_come(
        self, step: Step, n: int | None, left: bool, gradients: Gradients, accumulates: bool
    ) -> Iterator[Instant]:
        """What the step that failed would have needed from there on."""
        failure = self.failure
        reached = _ORDER.index(failure.phase) if failure.phase in _ORDER else -1
        order = [layer.name for layer in step.layers]
        at = order.index(failure.module) if failure.module in order else len(order)
        keeps = step.keeps_gradients and gradients == "kept"
        own = step.changed(keeps_gradients=keeps, drops_gradients=gradients == "dropped")
        rest = {"left_behind": self.left.bytes} if left and self.left.bytes else {}
        for instant in own.instants(n or step.samples, accumulates=accumulates):
            phase = _ORDER.index(instant.phase)
            if phase < reached:
                continue
            if phase == reached and "backward" in instant.phase and order.index(instant.module) > at:
                continue
            yield Instant(instant.phase, instant.module, {**instant.parts, **rest})

    def _of_parameters(self, module: str, size: int) -> bool:
        """A block as large as the module's weight is a gradient on its way, whatever it is called."""
        known = self.workload.modules.get(module)
        if known is None or not known.weight:
            return False
        return size == known.bytes * known.weight // (known.weight + known.bias)


def _with_states(sizes: dict[str, int], states: int) -> dict[str, int]:
    """With all optimizer states. In the step that makes them, those that are there count as its temporaries."""
    held, working = sizes.get("optimizer_states", 0), sizes.get("optimizer_temporaries", 0)
    making = min(max(states - held, 0), working)
    return {**sizes, "optimizer_states": max(held, states), "optimizer_temporaries": working - making}
