# SPDX-License-Identifier: Apache-2.0
"""Proves, for one batch, that samples do not mix and that the layers' gradients equal autograd's.

Mixing: for each binary digit of the samples' indices, and for 0 and 1, run a forward and a backward in which the
samples with that digit keep their values while all others get other values. The kept samples must have the same
outputs, and in every layer the same inputs and output gradients. If only kept samples have output gradients, no other
sample may get a gradient in any layer. Sums: with a random weight for each sample, the weighted sums of the layers'
gradients must equal autograd's gradients of the weighted outputs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from opacus_memprof.clipping.forwards.repetition import close
from opacus_memprof.clipping.forwards.state import Difference, ModuleState
from opacus_memprof.clipping.layers import Layer
from opacus_memprof.clipping.proof.batches import (
    HIGHEST,
    LARGE,
    LOWEST,
    MIDDLE,
    SMALL,
    VARIANTS,
    FixedDraws,
    cotangents,
    has_samples,
)
from opacus_memprof.clipping.proof.by_hand import GradientSums, add_gradients, without_cudnn, without_tf32, wrong_sums
from opacus_memprof.clipping.proof.program import Program, ProgramRuns, saved_buffers
from opacus_memprof.clipping.proof.recorder import (
    Doubt,
    MixingError,
    RowRecorder,
    Run,
    SumRecorder,
    agree,
)
from opacus_memprof.clipping.proof.summary import halves
from opacus_memprof.clipping.workspace import Workspace
from opacus_memprof.errors import MemprofError

_FEW = 16
"""Batches of up to so many samples are tested with twice as many kinds of other values."""


class Prover(ProgramRuns):
    """Proves for one batch that flash_clip clips a program exactly; see the top of this file.

    Args:
        program: the model's forward and its arguments.
        workspace: limit on the temporaries of a layer.
    """

    def __init__(self, program: Program, workspace: Workspace) -> None:
        super().__init__(program, workspace)
        self.is_finite = True
        self.draws = False

    # --- mixing ---
    def mixing(self, runs_jointly: bool = False) -> list[Doubt]:
        """Returns the layers whose data for a sample changes when other samples change or are missing.

        What differs on CUDA is compared again without cuDNN and TF32. cuDNN rounds differently in each run and for each
        size of a batch, often to TF32, and rounding that changes the sign of an input of ReLU changes gradients a lot.

        Args:
            runs_jointly: whether other ranks run the same forwards, so that this rank may not run more of them.

        Raises:
            MemprofError: the model cannot be clipped exactly.
            MixingError: an output depends on other samples.
            OutOfMemoryError: as PyTorch raises it.
        """
        if not self.program.is_on_cuda():
            return self._mixing(runs_jointly)
        if runs_jointly:
            with without_cudnn():
                doubts = self._mixing(runs_jointly)
            self.follow()
            return doubts
        doubts, refusal = [], None
        try:
            doubts = self._mixing(runs_jointly)
        except MixingError as error:
            refusal = error
        if not doubts and refusal is None:
            return []
        trace, patterns = self.trace, self.patterns
        try:
            with without_cudnn(), without_tf32():
                return self._mixing(runs_jointly)
        except (MemprofError, torch.OutOfMemoryError):
            raise
        except Exception:  # such as an operation that only cuDNN has
            if refusal is not None:
                raise refusal from None
            return doubts
        finally:
            self.trace, self.patterns = trace, patterns

    def _mixing(self, runs_jointly: bool) -> list[Doubt]:
        """Does the same as `mixing` with the kernels that PyTorch chooses."""
        batch = self.program.batch
        leaves, structure = self.program.leaves()
        whole = torch.ones(batch, dtype=torch.bool)
        bases = {True: self.backward(leaves, structure, whole, True)}
        self.trace, self.patterns, self.draws = bases[True].trace, bases[True].patterns, bases[True].draws
        # With gradients at outputs that have samples only, half of the time, no sample may get a gradient of another
        # sample.
        if bases[True].outputs and bases[True].has_shared:
            bases[False] = self.backward(leaves, structure, whole, False)
        for shared, base in bases.items() if runs_jointly else ():
            base.measure_rounding(partial(self.backward, leaves, structure, whole, shared))
        plans = [(plan, (i + i // 4) % VARIANTS) for i, plan in enumerate(halves(batch) * (2 if batch <= _FEW else 1))]
        for n in {0, batch - 1}:
            plans += [([i == n for i in range(batch)], SMALL), ([i != n for i in range(batch)], LARGE)]
        for i, (plan, variant) in enumerate(plans):
            kept = torch.tensor(plan)
            if batch > 1 and bool(kept.all()):
                continue
            shared = len(bases) == 1 or (i // 2) % 2 == 0
            other = self.run_with_others(self.backward, leaves, structure, kept, variant, i, shared)
            again = partial(self.backward, leaves, structure, whole, shared)
            doubts = bases[shared].compare(other, kept, not (shared and other.has_shared), again)
            if doubts:
                return doubts
        return self._alone(leaves, structure, bases)

    def is_mixing(self, digit: int) -> bool:
        """Returns whether three runs detect mixing: the batch, and for 0 and 1 the samples with this binary digit.

        Args:
            digit: the number of the digit in samples' indices; larger numbers wrap around.

        Raises:
            MixingError: an output depends on other samples.
        """
        if not self._is_mixing(digit):
            return False
        if not self.program.is_on_cuda():
            return True
        with without_cudnn(), without_tf32():  # see `mixing`
            return self._is_mixing(digit)

    def _is_mixing(self, digit: int) -> bool:
        leaves, structure = self.program.leaves()
        plans = halves(self.program.batch)
        first = 2 * digit % len(plans)
        arrangements = self.program.arrangements
        shared = digit % 2 == 0 or None not in arrangements or not any(arrangements)
        whole = torch.ones(self.program.batch, dtype=torch.bool)
        base = self.record(leaves, structure, whole, shared)
        for i in (first, first + 1):
            kept = torch.tensor(plans[i])
            other = self.run_with_others(self.record, leaves, structure, kept, (i + digit) % VARIANTS, digit, shared)
            no_leak = not (shared and None in arrangements)
            if not agree(base, other, kept, no_leak):
                again = self.record(leaves, structure, whole, shared)
                if not agree(base, other, kept, no_leak, again):
                    return True
        return False

    def check_carried(self) -> list[Difference]:
        """Checks that no data of a batch stays in the module. Called after `mixing`.

        A forward on these samples must have the same outputs after a forward on others, and leave the same buffers
        behind.

        Returns:
            What may hold data of another batch unless the program empties it before each forward, as it has for this
            one.

        Raises:
            MixingError: data stays.
        """
        if not self.changes_state:
            return []
        leaves, structure = self.program.leaves()
        emptied: list[Difference] = []

        def after(
            first: list[Any], structure: Any, kept: torch.Tensor, empties: bool
        ) -> list[tuple[str, torch.Tensor]]:
            module = self.program.module
            state = ModuleState(module)
            with self.running(RowRecorder(self.workspace)):
                self.outputs(first, structure)
                emptied[:] = [each for each in state.differences() if empties and each.was_empty()]
                for each in emptied:
                    each.undo()
                buffers = [(f"buffer {name}", x.detach().clone()) for name, x in saved_buffers(module)]
                self.program.random.restore()
                outputs, _ = self.outputs(leaves, structure)
                return buffers + [("", x.detach()) for x in outputs]

        kept = torch.zeros(self.program.batch, dtype=torch.bool)
        for empties in (False, True):
            own = after(leaves, structure, kept, empties)
            other = self.run_with_others(after, leaves, structure, kept, 0, 0, empties)
            pairs = [(name, a, b) for (name, a), (_, b) in zip(own, other, strict=True)]
            differ = [name for name, a, b in pairs if a.shape != b.shape or not close(b, a)]
            if not differ:
                return emptied
        for name in differ:
            if name:
                raise MixingError(
                    f"the model's forward writes data of the batch into the {name}, which is saved with the model and "
                    "is not private. Do not change it in training, or register it with persistent=False if the model "
                    "does not need it."
                )
            raise MixingError(
                "the model keeps data of a batch in an attribute or a buffer, and its next forward reads it, so that "
                "a sample influences later steps without being clipped. Pass what is carried on as an argument, or "
                "freeze the statistics. What the program itself sets anew before each call, set in the model's forward "
                "or, before each call, to None."
            )
        return []

    def _alone(self, leaves: list[Any], structure: Any, bases: dict[bool, Run]) -> list[Doubt]:
        """Repeats `_mixing` with half of the samples alone, in reverse order or, if that does not run, in order.

        A sample's data may depend on the number of samples, too, or on its place among them. Gradients of a loss that
        all samples share depend on their number, so that the whole batch in reverse order is compared, too, if there is
        one. Where random numbers are drawn, of which fewer samples would draw others, both batches run with
        `FixedDraws`: also with very low and very high numbers, since numbers may decide whether samples mix.

        Raises:
            MemprofError: the model cannot be clipped exactly.
            MixingError: random numbers depend on other samples.
        """
        order = list(range(self.program.batch))
        first = order[: len(order) // 2]
        if not first:
            return []
        plans = [(bases[len(bases) == 1], [first[::-1], first])]
        if bases[True].has_shared:
            plans += [(bases[True], [order[::-1]])]
        for base, choices in plans:
            for share in (MIDDLE, LOWEST, HIGHEST) if base.draws else (None,):
                for places in choices:
                    try:
                        doubts = self._of_places(leaves, structure, base, places, share)
                    except MemprofError:
                        raise
                    except Exception:  # the model does not run on these samples, or with such numbers
                        continue
                    if doubts:
                        return doubts
                    break
        return []

    def _of_places(
        self, leaves: list[Any], structure: Any, base: Run, places: list[int], share: float | None
    ) -> list[Doubt]:
        """Compares the samples at these places with these samples alone. See `_alone`."""
        batch, kept = self.program.batch, torch.ones(len(places), dtype=torch.bool)
        some = [leaf[places] if has_samples(leaf, batch) else leaf for leaf in leaves]
        part = Prover(replace(self.program, batch=len(places), places=places), self.workspace)
        if share is None:
            other = part.backward(some, structure, kept, base.with_shared)
            return base.at(places).differences(other, kept, no_leak=False, may_jump=True)
        of_whole, of_part = FixedDraws(share), FixedDraws(share)
        try:
            with of_whole:
                base = self.backward(leaves, structure, torch.ones(batch, dtype=torch.bool), base.with_shared)
            with of_part:
                other = part.backward(some, structure, kept, base.with_shared)
        except MemprofError:
            if share == MIDDLE:
                raise
            return []  # such as a layer that is never called otherwise: a forward that calls it is proved then
        if any(a != b for a, b in zip(of_whole.seeds, of_part.seeds, strict=False)):
            raise MixingError(
                "the model seeds a random number generator in its forward with a number that depends on the batch, so "
                "that a sample's random numbers depend on other samples. Seed generators outside of the model, by "
                "numbers that do not depend on data."
            )
        if not of_whole.is_same(of_part) or base.draws_outside or other.draws_outside:
            return []
        if share != MIDDLE and not (base.is_finite() and other.is_finite()):
            return []
        return base.at(places).differences(other, kept, no_leak=False, may_jump=True)

    # --- sums ---
    def sums(self) -> list[Doubt]:
        """Returns the layers whose gradients do not add up to autograd's.

        If they do not with a random weight for each sample, a backward that is not linear may be the reason, such as
        one that clamps gradients. Such a backward may be right for sums over some samples, without other samples'
        gradients.
        """
        program, generator = self.program, torch.Generator().manual_seed(7)
        weights = torch.rand(program.batch, generator=generator, dtype=torch.float64) + 0.5
        if None in program.arrangements:  # data that all samples share has no weights
            return self._sums(torch.ones_like(weights))
        doubts = self._sums(weights)
        if doubts and self.is_finite:
            some = [torch.tensor(plan) for plan in halves(program.batch)]
            some += [torch.rand(program.batch, generator=generator) < 0.5 for _ in range(4)]
            if not any(self._sums(each.to(weights)) for each in some):
                return []
        return doubts

    def _sums(self, weights: torch.Tensor) -> list[Doubt]:
        program, whole = self.program, torch.ones_like(weights)
        leaves, structure = program.leaves()
        recorder = SumRecorder(self.workspace, weights)
        with self.running(recorder):
            outputs, arrangements = self.outputs(leaves, structure)
            torch.autograd.backward(outputs, cotangents(outputs, arrangements, program.drawn, whole, True))
        device = program.random.device_type()
        if torch.is_autocast_enabled(device):
            for own in recorder.sums.values():
                own.dtype = max(own.dtype, torch.get_autocast_dtype(device), key=lambda dtype: torch.finfo(dtype).eps)
        wrong, self.is_finite = wrong_sums(
            recorder.sums.items(), lambda scale: self._autograd(leaves, structure, weights * scale)
        )
        doubts: dict[Layer, Doubt] = {}
        for parameter, error in wrong.items():
            for layer in recorder.sums[parameter].layers:
                reason = f"gives {program.trained.get(parameter, 'a parameter')} a gradient that is {error:.1%} off"
                doubts.setdefault(layer, Doubt(layer, reason, moves=False))
        return list(doubts.values())

    def _autograd(self, leaves: list[Any], structure: Any, weights: torch.Tensor) -> GradientSums:
        program = self.program
        with self.running(RowRecorder(self.workspace)), program.hooks.off():
            outputs, arrangements = self.outputs(leaves, structure)
            given = cotangents(outputs, arrangements, program.drawn, weights, True)
            total: GradientSums = dict.fromkeys(program.trained)
            add_gradients(outputs, given, total)
            return total
