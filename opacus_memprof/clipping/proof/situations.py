# SPDX-License-Identifier: Apache-2.0
"""Knows which situations of a model are proved, and proves new ones: under FSDP2, together on all ranks."""

import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus_memprof.clipping.agreement import Agreement, Lockstep, computing_device
from opacus_memprof.clipping.arguments import Check, has_sums_checked
from opacus_memprof.clipping.forwards.state import Arrangement, Difference, RandomState, restoring_state
from opacus_memprof.clipping.kernels.native import OperationLog
from opacus_memprof.clipping.layer_hooks import LayerHooks, Layout, PlainLayer, plain_layers
from opacus_memprof.clipping.layers import GenericLayer, Layer
from opacus_memprof.clipping.layers.registry import LayerRegistry
from opacus_memprof.clipping.proof.batches import has_samples
from opacus_memprof.clipping.proof.certificate import SituationRecord
from opacus_memprof.clipping.proof.model_state import Arguments, only_saved_tensors_hooks, without_compiled_autograd
from opacus_memprof.clipping.proof.probe import CannotRunError, Probe
from opacus_memprof.clipping.proof.program import Program
from opacus_memprof.clipping.proof.prover import Prover
from opacus_memprof.clipping.proof.recorder import Doubt
from opacus_memprof.clipping.proof.row_moves import modules_that_move_rows
from opacus_memprof.clipping.proof.summary import release
from opacus_memprof.clipping.workspace import Workspace
from opacus_memprof.errors import MemprofError

_LEAST = 4
"""Least number of samples in a proof of mixing. Smaller batches are filled with samples made from theirs."""
_SHARE = 16
"""A repeated check uses one part of the batch out of so many; of sharded models at least `_LEAST` samples."""

Run = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
Order = list[tuple["Layer | None", bool]]


def order_of(trace: Sequence[Layer | None]) -> Order:
    """Returns the layers in the order of their first calls, each with whether it is called once.

    The number of calls of a recurrent layer is ignored, because it depends on the lengths of samples.
    """
    counts = Counter(trace)
    return [(layer, count == 1) for layer, count in counts.items()]


@dataclass
class Situation:
    """The state of knowledge about forwards of one kind.

    Attributes:
        layouts: the position of samples in the tensors of layers.
        plain: the PlainLayers, by module.
        arrangements: the position of samples in the output's tensors; None for tensors that all samples share.
        computed_in: the coarsest dtype in which the model computes with its inputs; None if that is not known.
        traces: the orders of layer calls that are proved; see `order_of`.
        patterns: the patterns of proved forwards' autograd graphs, from their outputs; see `graph_patterns`.
        operations: the operations that proved forwards have run, and their numbers.
        draws: whether the forward draws random numbers.
        changes_state: whether the forward changes the model's buffers or attributes.
        forwards: the number of forwards so far.
        emptied: what the program must have emptied before each forward; see `Prover.check_carried`.
        share: the fraction of the batch that the proof used: less than 1 if memory was not enough for all.
        is_finite: whether all numbers in the proof were finite; otherwise the next forward repeats it.
        record: the record of this situation in the certificate; None until its proof has ended.
    """

    layouts: dict[Layer, Layout]
    plain: dict[nn.Module, PlainLayer]
    arrangements: list[Arrangement | None]
    computed_in: torch.dtype | None = None
    traces: list[Order] = field(default_factory=list)
    patterns: set[int] = field(default_factory=set)
    operations: OperationLog = field(default_factory=OperationLog)
    draws: bool = False
    changes_state: bool = False
    forwards: int = 0
    emptied: list[Difference] = field(default_factory=list)
    share: float = 1.0
    is_finite: bool = True
    record: SituationRecord | None = None

    def repeats(self) -> list[Layer]:
        """Returns the layers whose forward is repeated, which does not give what they add to a cache a gradient."""
        return [layer for layer in self.layouts if isinstance(layer, GenericLayer)]


class Situations:
    """The situations of a model.

    Args:
        units: the layers of the model.
        hooks: the hooks of the layers.
        workspace: limit on the temporaries of a layer.
        check: how often a situation is checked.
        run: calls a module with arguments, with the hooks of layers.
        attach: adds hooks to modules of new layers.
        trained: names of the trained parameters.
        agreement: communication between the ranks, under FSDP2.
    """

    def __init__(
        self,
        units: LayerRegistry,
        hooks: LayerHooks,
        workspace: Workspace,
        check: Check,
        run: Run,
        attach: Callable[[], None],
        trained: dict[nn.Parameter, str],
        agreement: Agreement | None = None,
    ) -> None:
        self.units, self.hooks, self.workspace = units, hooks, workspace
        self.check: Check = check
        self.run, self.attach, self.trained = run, attach, trained
        self.agreement = agreement
        self.arguments = Arguments()
        self.known: dict[Any, Situation] = {}
        self._is_eager = True  # whether proofs run without compilation

    def prove(self, entry: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], random: RandomState) -> Situation:
        """Finds the position of samples in layers, and proves that clipping is exact for these arguments.

        Args:
            entry: the module that is called.
            args: its positional arguments.
            kwargs: its keyword arguments.
            random: the initial state of the random number generators.

        Raises:
            MemprofError: clipping is not exact, or this cannot be proved.
            CannotRunError: the module cannot run on other samples.
        """
        if self.agreement is None:
            try:
                return self._prove(entry, args, kwargs, random, self.run)
            except CannotRunError as error:
                if not self._is_eager or "torch._dynamo" not in sys.modules:
                    raise
                self._is_eager = False  # torch.cond and its like compile what they are given
                try:
                    return self._prove(entry, args, kwargs, random, self.run)
                except CannotRunError:
                    self._is_eager = True
                    raise error from error.__cause__
        ranks = Lockstep(self.agreement)

        def run(entry: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            ranks.begin_forward()
            return self.run(entry, args, kwargs)

        try:
            situation = self._prove(entry, args, kwargs, random, run)
        except Exception as error:
            ranks.end(error)
            raise
        ranks.end(None)
        return situation

    def _prove(
        self, entry: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], random: RandomState, call: Run
    ) -> Situation:
        hooks = self.hooks

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return call(entry, args, kwargs)

        hooks.plain = {}
        probe = Probe(entry, self.units, hooks, args, kwargs, run, self._units_changed)
        probe.refuses_writes = self.check != "off" and not self.units.is_sharded
        with self._proving(entry):
            situation = self._situation(probe)
            if self.check == "off":
                return situation
            for module, inside in modules_that_move_rows(probe):
                if probe.repeat_at(module, inside):
                    situation = self._situation(probe)
            for _ in range(4 * len(self.units.layers()) + 16):
                doubts = self._doubts(probe, situation, random)
                if not doubts:
                    return situation
                for doubt in doubts:
                    if doubt.layer.trainable():
                        probe.repeat_more(doubt.layer, doubt.moves, f"{doubt.layer.describe()} {doubt.reason}.")
                situation = self._situation(probe)
        raise MemprofError("flash_clip found no way to clip this model exactly; use grad_sample_mode='hooks'.")

    def recheck(
        self, key: Any, entry: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], random: RandomState
    ) -> Situation:
        """Checks a situation again: completely if `check` is "always", otherwise a part of the batch, with few runs.

        If something has changed, runs a new proof.

        Args:
            key: the key of the situation.
            entry: see `prove`.
            args: see `prove`.
            kwargs: see `prove`.
            random: see `prove`.

        Raises:
            MemprofError: clipping is not exact, or this cannot be proved.
            CannotRunError: the module cannot run on other samples.
            OutOfMemoryError: as PyTorch raises it.
        """
        situation, batch = self.known[key], self.hooks.batch
        count = batch if self.check == "always" else min(batch, max(2, batch // _SHARE))
        drawn = Random(situation.forwards).sample(range(batch), count)
        leaves, structure = tree_flatten((args, kwargs))
        with only_saved_tensors_hooks():
            some = [leaf[sorted(drawn)] if has_samples(leaf, batch) else leaf for leaf in leaves]

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self.run(entry, args, kwargs)

        self.hooks.layouts, self.hooks.plain = situation.layouts, situation.plain
        prover = self._prover(entry, run, tree_unflatten(some, structure), count, random, situation)
        has_sums = has_sums_checked(self.check, situation.forwards)
        try:
            with self._proving(entry):
                is_mixing = (
                    prover.mixing() if self.check == "always" else prover.is_mixing(situation.forwards.bit_length())
                )
                is_same = not is_mixing and not (has_sums and prover.sums())
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the new proof reports the cause
            is_same = False
        if is_same:
            for what in ("mixing", "sums") if has_sums else ("mixing",):
                if situation.record is not None:
                    situation.record.note(what, count / batch)
            return situation
        del self.known[key]
        new = self.known[key] = self.prove(entry, args, kwargs, random)
        new.forwards, new.record = situation.forwards, situation.record
        return new

    @contextmanager
    def _proving(self, entry: nn.Module) -> Iterator[None]:
        """Isolates the runs inside the context from the training, and restores the module's state."""
        batch = self.hooks.batch
        try:
            with (
                eager() if self._is_eager else nullcontext(),
                without_compiled_autograd(),
                only_saved_tensors_hooks(),
                restoring_state(entry),
                torch.enable_grad(),
            ):
                yield
        finally:
            self.hooks.batch = batch
            release()

    def _situation(self, probe: Probe) -> Situation:
        self.hooks.plain = {}
        layouts = probe.layouts()
        plain = plain_layers(self.units.at, layouts)
        self.hooks.layouts, self.hooks.plain = layouts, plain
        return Situation(layouts, plain, probe.arrangements)

    def _doubts(self, probe: Probe, situation: Situation, random: RandomState) -> list[Doubt]:
        count = max(self.hooks.batch, _LEAST)
        while True:
            try:
                return self._doubts_of(probe, situation, random, count)
            except torch.OutOfMemoryError:
                # Under FSDP2 all ranks run the same forwards, and other ranks may have memory left.
                if count <= _LEAST or self.units.is_sharded:
                    raise
                count = max(_LEAST, count // 2)
            except MemprofError:
                raise
            except Exception as error:
                raise CannotRunError from error

    def _doubts_of(self, probe: Probe, situation: Situation, random: RandomState, count: int) -> list[Doubt]:
        """Returns the layers that are not proved, using so many samples.

        This is the whole batch, more for a small batch, or fewer if memory is not enough for all.
        """
        batch, leaves = self.hooks.batch, probe.leaves
        situation.computed_in = probe.computed_in
        if count > batch:
            leaves = probe.leaves_of(range(count))
        elif count < batch:
            leaves = [leaf[:count] if has_samples(leaf, batch) else leaf for leaf in leaves]
        given = tree_unflatten(leaves, probe.structure)
        prover = self._prover(probe.model, probe.run_model, given, count, random, situation)
        doubts = prover.mixing(runs_jointly=self.agreement is not None)
        if doubts:
            return doubts
        if not self.units.is_sharded:
            situation.emptied = prover.check_carried()
        real = prover
        if count > batch:
            given = tree_unflatten(probe.leaves, probe.structure)
            real = self._prover(probe.model, probe.run_model, given, batch, random, situation)
        doubts = [] if self.units.is_sharded else real.sums()
        if real is not prover:
            real.follow()
        situation.traces, situation.patterns = [order_of(real.trace)], set(real.patterns)
        situation.draws, situation.changes_state = prover.draws, prover.changes_state
        situation.share = min(1.0, count / batch)
        situation.is_finite = real.is_finite
        return doubts

    def _prover(
        self,
        entry: nn.Module,
        run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        given: tuple[tuple[Any, ...], dict[str, Any]],
        batch: int,
        random: RandomState,
        situation: Situation,
    ) -> Prover:
        arrangements, trained, leaves_caches_out = situation.arrangements, self.trained, bool(situation.repeats())
        program = Program(
            entry, run, self.hooks, *given, batch, batch, random, arrangements, trained, leaves_caches_out
        )
        program.computed_in = situation.computed_in
        return Prover(program, self.workspace)

    def _units_changed(self) -> None:
        self.known.clear()
        self.hooks.plain = {}
        self.attach()


def eager() -> AbstractContextManager[Any]:
    """Disables compilation inside the context, for the runs of a proof."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@dataclass
class JointProof:
    """A proof that all ranks run together, with the same forwards.

    Attributes:
        is_new: whether a situation is proved for the first time, rather than checked again.
        is_own: whether it is the situation of this rank's batch.
        args, kwargs: the arguments, with one rank's samples.
        batch: the number of samples.
        random: the initial state of the random number generators.
    """

    is_new: bool
    is_own: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: int
    random: RandomState


class JointProofs:
    """Proofs of the same situation with the same samples and random numbers on all ranks.

    Every forward needs the parameters of all ranks, and all ranks must come to the same result.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.agreement = Agreement(computing_device(next(model.parameters())))
        self._modules = [each for each in model.modules() if isinstance(each, FSDPModule)]

    def reshard(self) -> None:
        """Reshards modules that a forward without a backward has left gathered."""
        for module in self._modules:
            if any(not isinstance(p, DTensor) for p in module.parameters()):
                module.reshard()

    def next(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch: int,
        situation: object,
        trained: Iterable[str],
        need: int,
        random: RandomState | None,
        error: MemprofError | None,
    ) -> JointProof | None:
        """Returns the next proof. All ranks call it before each forward, until it returns None.

        Args:
            args: the model's positional arguments.
            kwargs: its keyword arguments.
            batch: the number of samples of this rank.
            situation: a description of this rank's situation, without details that differ between processes.
            trained: the names of the trained parameters, whose gradients backward reduces over the ranks.
            need: 2 if this rank's situation is new, 1 if it must be checked again, otherwise 0.
            random: the initial state of this rank's random number generators.
            error: an error that this rank has raised, or None.

        Raises:
            MemprofError: `error`, or another rank's error; or ranks call the model with arguments of different kinds,
                or train different parameters.
        """
        world, rank = self.agreement.world_size, self.agreement.rank
        leaves, structure = tree_flatten((args, kwargs))
        kind = zlib.crc32(repr((str(structure), [_kind(leaf) for leaf in leaves])).encode())
        # Priority: most urgent, then largest batch, then lowest rank.
        place = (need << 48) + (batch << 16) + world - rank
        kinds, names, (_, first) = self.agreement.settle(error, [kind, zlib.crc32(repr([*trained]).encode()), place])
        if kinds[0] != kinds[1]:
            raise MemprofError("the ranks call the model with different kinds of arguments; FSDP2 needs equal kinds.")
        if names[0] != names[1]:
            raise MemprofError(
                "the ranks train different parameters of the model, which FSDP2 shards over all of them: freeze and "
                "unfreeze them on all ranks alike."
            )
        if not first >> 48:
            return None
        source = world - first % (1 << 16)
        sent: list[Any] = [None] * 4
        if rank == source:
            count = batch if need == 2 else min(batch, max(_LEAST, -(-batch // _SHARE)))
            sent = [[_some(leaf, batch, count) for leaf in leaves], count, random, repr(situation)]
        dist.broadcast_object_list(sent, source)
        if sent[0] is None:  # a simulated rank runs without the others
            return None
        moved = [
            new.to(own.device) if isinstance(new, torch.Tensor) else new
            for new, own in zip(sent[0], leaves, strict=True)
        ]
        args, kwargs = tree_unflatten(moved, structure)
        is_new = first >> 48 == 2
        return JointProof(is_new, sent[3] == repr(situation), args, kwargs, sent[1], self._on_own_device(sent[2]))

    def _on_own_device(self, random: RandomState) -> RandomState:
        device = self.agreement.device
        return replace(random, cuda=[(device.index, state) for _, state in random.cuda])


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dim(), leaf.dtype
    return leaf if leaf is None or isinstance(leaf, (bool, str)) else type(leaf)


def _some(leaf: Any, batch: int, count: int) -> Any:
    """Returns the first samples of a leaf, on the CPU."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.detach()
    return (leaf[:count] if leaf.dim() and len(leaf) == batch else leaf).cpu()
