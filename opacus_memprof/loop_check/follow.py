# SPDX-License-Identifier: Apache-2.0
"""Follows a program's use of its private models and optimizers, and checks their logical steps."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.accountants import GaussianAccountant, PRVAccountant, RDPAccountant
from opacus.grad_sample.gsm_base import AbstractGradSampleHooks
from opacus.optimizers import DPOptimizer
from opacus.schedulers import _GradClipScheduler, _NoiseScheduler
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data.dataloader import _BaseDataLoaderIter

from opacus_memprof.clipping.forwards.state import GivenRows
from opacus_memprof.clipping.module.calls import open_objects
from opacus_memprof.clipping.proof.loss_graph import reductions_of
from opacus_memprof.loop_check.deliveries import Deliveries
from opacus_memprof.loop_check.explain import explain, foreign_parameters
from opacus_memprof.loop_check.loss import LossScale
from opacus_memprof.loop_check.records import (
    Call,
    Findings,
    LogicalStep,
    PhysicalBatch,
    PrivateModel,
    RandomState,
    StepResult,
    first_line,
    listed,
    physical_batches,
)
from opacus_memprof.loop_check.step_check import StepCheck, clip_bound, noise_std

STEPS = 2
_MOST_STEPS = 10  # including steps with an empty batch


class CheckEnded(BaseException):
    """Ends the program after the last step to check. Not an Exception, because programs catch those."""


class _Optimizer:
    """A private optimizer, and the recorded data of its current logical step."""

    def __init__(self, optimizer: DPOptimizer, given: Any) -> None:
        self.optimizer = optimizer
        self.given = given
        self.waiting: list[PhysicalBatch] = []  # backward has run, but not optimizer.step()
        self.clipped: list[PhysicalBatch] = []  # by skipped steps
        self.step: LogicalStep | None = None  # prepared, for the original optimizer
        self.check: StepCheck | None = None
        self.last_noise = torch.empty(0)
        self.left: dict[str, torch.Tensor] = {}  # the parameters after the last step
        self.steps = 0

    def parameters(self) -> set[int]:
        return {id(p) for group in self.optimizer.param_groups for p in group["params"]}


class Follower:
    """Records the private training of this process and checks it.

    Attributes:
        findings: defects and notes so far.
        results: the measurements of the checked logical steps.
        roots: the private models.
    """

    def __init__(self) -> None:
        self.findings = Findings()
        self.results: list[StepResult] = []
        self.roots: list[PrivateModel] = []
        self.optimizers: list[_Optimizer] = []
        self.own_steps = 0
        self._paused = False
        self._scale = LossScale()
        self._deliveries = Deliveries(self.findings)
        self._pass = 0  # number of backward calls so far
        self._in_backward = 0
        self._in_ghost_backward = False
        self._calls: list[Call] = []  # without a complete backward
        self._schedulers: dict[int, bool] = {}

    def install(self) -> None:
        """Wraps the functions of Opacus and torch that private training calls, to record their calls.

        Opacus must have been imported.
        """
        _around(AbstractGradSampleHooks, "__init__", self._make_hooks)
        _around(DPOptimizer, "__init__", self._make_optimizer)
        _around(DPTensorFastGradientClipping, "backward", self._ghost_backward)
        for scheduler in (_NoiseScheduler, _GradClipScheduler):
            _around(scheduler, "__init__", self._make_scheduler)
            _around(scheduler, "step", self._scheduler_step)
        _around(ReduceLROnPlateau, "step", self._plateau_step)
        _around(torch.amp.GradScaler, "scale", self._scale.on_scaler)
        _around(PrivacyEngine, "_prepare_data_loader", self._deliveries.on_prepare)
        for accountant in (RDPAccountant, PRVAccountant, GaussianAccountant):
            _around(accountant, "step", self._deliveries.on_accounted)
        _around(_BaseDataLoaderIter, "__next__", self._deliveries.on_next)
        original = torch.autograd.backward
        torch.autograd.backward = functools.wraps(original)(functools.partial(self._backward, original))
        torch.compile = self._no_compile
        register_optimizer_step_pre_hook(self._before_original)
        register_optimizer_step_post_hook(self._after_original)

    def finish(self) -> None:
        """Adds notes about expected events that did not happen."""
        if any(not stepped for stepped in self._schedulers.values()):
            self.findings.not_checked(
                "schedulers of noise or clipping", "they did not act before the last checked step."
            )
        if self.results and len(self.results) < STEPS:
            self.findings.not_checked("a second logical step", "it was not reached.")

    def explain(self, error: BaseException) -> bool:
        """Explains an error of Opacus as a defect. Returns whether it was one.

        After a step of another optimizer it is not: Opacus still has the gradients that the private one has not used.
        """
        held = {p for each in self.optimizers for p in each.parameters()}
        sentence = explain(error, self.roots, held) if not self.own_steps else None
        if sentence is not None:
            self.findings.defect(sentence)
        return sentence is not None

    # --- models ---
    def _make_hooks(self, original: Any, hooks: Any, m: nn.Module, /, *args: Any, **kwargs: Any) -> None:
        if self._paused:
            original(hooks, m, *args, **kwargs)
            return
        root = PrivateModel(hooks, m)
        original(hooks, m, *args, **kwargs)
        self.roots.append(root)
        if not getattr(hooks, "batch_first", True):
            self.findings.not_checked(
                "the positions of samples", "batch_first=False, and dimension 0 is taken for them."
            )
        m.register_forward_pre_hook(self._recorder(root), with_kwargs=True, prepend=True)

    def _recorder(self, root: PrivateModel) -> Callable[..., None]:
        """Returns the hook that records a training call: a closure, so a copied model does not copy the follower."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            is_training = module.training and torch.is_grad_enabled()
            if self._paused or self._in_backward or root.recording or not is_training or module is not root.outer:
                return
            kind = next(root.model.parameters()).device.type
            cast, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
            open_objects((args, kwargs))
            call = Call(
                root,
                args=tree_map(_clone, args),
                kwargs=tree_map(_clone, kwargs),
                random=RandomState(),
                buffers={name: x.detach().clone() for name, x in root.model.named_buffers()},
                training=[each.training for each in root.model.modules()],
                autocast=lambda: torch.autocast(kind, dtype=dtype, enabled=cast),
                sources=self._deliveries.sources((args, kwargs)),
                rows=_rows_of(args, kwargs),
            )
            root.recording = True

            def after(module: nn.Module, args: Any, output: Any) -> None:
                handle.remove()
                root.recording = False
                if output is not None:
                    self._watch(call, output)

            # Registered now, so that it comes after the hooks of every mode.
            handle = module.register_forward_hook(after, always_call=True)

        return before

    def _watch(self, call: Call, output: Any) -> None:
        open_objects(output)
        for index, leaf in enumerate(tree_flatten(output)[0]):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                call.outputs[index] = leaf.detach().clone()
                call.nodes.append(leaf.grad_fn)
                register: Any = leaf.register_hook
                register(functools.partial(self._on_cotangent, call, index))
        if call.outputs:
            self._calls.append(call)
        else:
            self.findings.not_checked("a training call of the model", "it returned no tensors with gradients.")

    def _on_cotangent(self, call: Call, index: int, gradient: torch.Tensor) -> None:
        # The second backward of ghost clipping runs with hooks disabled: its loss is weighted by the clip factors.
        if self._paused or not getattr(call.root.hooks, "hooks_enabled", True):
            return
        call.in_pass = call.in_pass or self._pass
        gradient = gradient.detach().clone()
        call.cotangents[index] = call.cotangents[index] + gradient if index in call.cotangents else gradient

    def _backward(self, original: Any, tensors: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self._paused or self._in_backward:
            return original(tensors, *args, **kwargs)
        self._pass += 1
        factor = self._scale.factor_of(tensors)
        reductions = self._reductions(tensors, *args, **kwargs)
        before = {id(root): root.gradients() for root in self.roots}
        self._in_backward += 1
        try:
            with self._explained():
                result = original(tensors, *args, **kwargs)
        finally:
            self._in_backward -= 1
        ran = [call for call in self._calls if call.in_pass == self._pass]
        self._calls = [call for call in self._calls if call.in_pass == 0]
        for root in self.roots:
            calls = [call for call in ran if call.root is root]
            if calls:
                root.after_backward = root.per_sample_gradients()
                self._check_changes(root)
                batch = PhysicalBatch(calls, *factor, is_plain=not self._in_ghost_backward, reductions=reductions)
                if not _is_of_several_ranks():
                    batch.gradients = _added(root.gradients(), before[id(root)])
                for call in calls:
                    call.nodes = []
                for followed in self._optimizers_of(root):
                    followed.waiting.append(batch)
        return result

    def _reductions(self, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> set[str]:
        """How the loss is reduced, asked before backward releases the graph."""
        losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        given = list(grad_tensors) if isinstance(grad_tensors, (list, tuple)) else [grad_tensors] * len(losses)
        return reductions_of(losses, given, {node for call in self._calls for node in call.nodes})

    def _check_changes(self, root: PrivateModel) -> None:
        """Finds a program that updates parameters by itself."""
        if self.own_steps or any(each.steps for each in self._optimizers_of(root)):
            root.before_steps = {}
            return
        before, root.before_steps = root.before_steps, {name: p.detach().clone() for name, p in root.trained().items()}
        moved = [
            name for name, p in before.items() if name in root.before_steps and not p.equal(root.before_steps[name])
        ]
        root.changes += bool(moved)
        if root.changes == STEPS:
            self.findings.defect(
                f"The script changes {listed(moved)} between backward passes without a step of the private optimizer: "
                "such updates are neither clipped nor noised. Call step() of the optimizer that make_private returns, "
                "or of the DPOptimizer."
            )
            raise CheckEnded

    def _ghost_backward(self, original: Any, loss: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._in_ghost_backward = True
        try:
            with self._explained():
                return original(loss, *args, **kwargs)
        finally:
            self._in_ghost_backward = False

    # --- optimizers ---
    def _make_optimizer(self, original: Any, optimizer: Any, /, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        if self._paused:
            return
        given: Any = getattr(optimizer, "max_grad_norms", kwargs.get("max_grad_norm"))
        followed = _Optimizer(optimizer, list(given) if isinstance(given, (list, tuple)) else given)
        self.optimizers.append(followed)
        for name, method in (
            ("step", self._step),
            ("pre_step", self._pre_step),
            ("add_noise", self._add_noise),
            ("zero_grad", self._zero_grad),
        ):
            setattr(optimizer, name, _bound(optimizer, name, functools.partial(method, followed)))

    def _optimizers_of(self, root: PrivateModel) -> list[_Optimizer]:
        names = root.names()
        return [each for each in self.optimizers if names.keys() & each.parameters()]

    def _step(self, followed: _Optimizer, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        foreign = foreign_parameters(followed.optimizer, self.roots)
        if foreign is not None:
            self.findings.defect(foreign)
        with self._explained():
            return original(*args, **kwargs)

    def _pre_step(self, followed: _Optimizer, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        optimizer = followed.optimizer
        self._check_per_sample_gradients(followed)
        bound = clip_bound(optimizer, followed.given)
        for batch in followed.waiting:
            batch.bound = bound
        followed.clipped += followed.waiting
        of_models = [id(batch.calls[0].root) for batch in followed.waiting]
        passes = max(map(of_models.count, of_models), default=0)
        step = LogicalStep(followed.clipped, passes, noise_std(optimizer))
        followed.waiting = []
        followed.step = step  # add_noise, which is called next, stores into it
        is_ready = False
        self._in_backward += 1  # flash_clip proves its clipping here, with calls and backward passes of its own
        try:
            is_ready = original(*args, **kwargs)
        finally:
            self._in_backward -= 1
            if is_ready:
                followed.clipped = []
                grads = [(id(p), p.grad) for p in optimizer.params if p.grad is not None]
                step.scaled = {key: float(gradient.double().norm()) for key, gradient in grads}
            else:
                followed.step = None
        return is_ready

    def _check_per_sample_gradients(self, followed: _Optimizer) -> None:
        for root in {id(batch.calls[0].root): batch.calls[0].root for batch in followed.waiting}.values():
            now = root.per_sample_gradients()
            is_same = len(now) == len(root.after_backward) and all(
                a is b and old == new for (a, old), (b, new) in zip(root.after_backward, now, strict=True)
            )
            root.after_backward = []
            if now and not is_same:
                for batch in followed.waiting:
                    batch.is_changed = True

    def _add_noise(self, followed: _Optimizer, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        parameters = followed.optimizer.params
        step = followed.step
        if step is None:
            return original(*args, **kwargs)
        for p in parameters:
            if getattr(p, "summed_grad", None) is not None:
                step.summed[id(p)] = p.summed_grad.detach().clone().reshape(p.shape)
        result = original(*args, **kwargs)
        divisor = float(args[0] if args else kwargs.get("divisor", 1.0))
        for p in parameters:
            if p.grad is not None:
                step.noised[id(p)] = p.grad.detach() * divisor
        return result

    def _zero_grad(self, followed: _Optimizer, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not self._in_ghost_backward and not self._paused:
            dropped = len(followed.waiting)
            if not followed.optimizer._is_last_step_skipped:
                dropped, followed.clipped = dropped + len(followed.clipped), []
            followed.waiting = []
            if dropped:
                self.findings.note(
                    f"zero_grad dropped {physical_batches(dropped)} between backward and step.",
                    "dropped",
                )
        return original(*args, **kwargs)

    def _before_original(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._paused:
            return
        followed = self._followed_by(optimizer)
        if followed is not None and followed.step is not None:
            root = next((root for root in self.roots if followed in self._optimizers_of(root)), None)
            if root is not None:
                followed.check = StepCheck(followed.optimizer, followed.given, root, followed.step, self.findings)
                with self._pause():
                    followed.check.before_update(followed.left)
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        names = [name for root in self.roots for name, p in root.trained().items() if id(p) in held]
        if names:
            own = "that the private optimizer was made from" if followed is not None else "of its own"
            self.findings.defect(
                f"The script steps an optimizer {own} ({type(optimizer).__name__}), not the private one: {names[0]} "
                f"and {len(names) - 1} more parameters of the private model are updated from gradients that are "
                "neither clipped nor noised. Call step() and zero_grad() of the optimizer that make_private returns, "
                "or of the DPOptimizer.",
                "own optimizer",
            )
            self.own_steps += 1
        elif self.roots:
            self.findings.not_checked(
                f"what {type(optimizer).__name__} updates, which is not a private optimizer ({len(held)} parameters "
                "that are not the private model's)",
                "where their gradients depend on the data, nothing clips them or adds noise.",
                "others",
            )

    def _followed_by(self, original: Any) -> _Optimizer | None:
        """Returns the private optimizer of an original one: of several, that which makes a step."""
        own = [each for each in self.optimizers if each.optimizer.original_optimizer is original]
        return next((each for each in own if each.step is not None), own[0] if own else None)

    def _after_original(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._paused:
            return
        followed = self._followed_by(optimizer)
        if followed is not None and followed.step is not None:
            calls = [call for batch in followed.step.batches for call in batch.calls]
            check, followed.step, followed.check = followed.check, None, None
            followed.steps += 1
            if check is not None:
                self._deliveries.check(followed.steps, calls, followed.optimizer, check.result.samples)
                with self._pause():
                    followed.left = check.after_update()
                self._compare_noise(followed, check)
                self.results.append(check.result)
        followed_steps = [result for result in self.results if result.samples]
        if len(followed_steps) >= STEPS or len(self.results) >= _MOST_STEPS or self.own_steps >= STEPS:
            raise CheckEnded

    def _compare_noise(self, followed: _Optimizer, check: StepCheck) -> None:
        """Finds noise that repeats because a generator is seeded in each step."""
        old, new = followed.last_noise, check.noise_sample
        if len(new) >= 16 and old.shape == new.shape and float((old - new).abs().max()) < 1e-2:
            self.findings.defect(
                "The noise of a step is the same as that of the step before: seed the noise generator once, not in "
                "each step."
            )
        followed.last_noise = new

    # --- schedulers, compiled models ---
    def _make_scheduler(self, original: Any, scheduler: Any, /, *args: Any, **kwargs: Any) -> None:
        original(scheduler, *args, **kwargs)
        self._schedulers[id(scheduler)] = False  # constructors may call step()

    def _scheduler_step(self, original: Any, scheduler: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._schedulers[id(scheduler)] = True
        return original(scheduler, *args, **kwargs)

    def _plateau_step(self, original: Any, scheduler: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.findings.not_checked(
            "learning rates of ReduceLROnPlateau",
            "they follow the number that it is given: a loss of training samples is not private, one of public samples "
            "can be.",
            "plateau",
        )
        return original(scheduler, *args, **kwargs)

    def _no_compile(self, model: Any = None, **kwargs: Any) -> Any:
        self.findings.not_checked("compiled code", "torch.compile is off during the check.")
        return model if model is not None else lambda each: each

    # --- helpers ---
    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        """Runs a check inside the context without recording it, and restores the random number generators."""
        state, self._paused = RandomState(), True
        try:
            yield
        except Exception as error:  # a defect of the check must not end the program
            self.findings.failure = self.findings.failure or first_line(error)
        finally:
            self._paused = False
            state.restore()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._paused:
                self.explain(error)
            raise


def _rows_of(args: Any, kwargs: Any) -> GivenRows | None:
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor) and x.dim()]
    return GivenRows(tensors, len(tensors[0])) if tensors else None


def _added(gradients: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a backward has added to gradients, without unchanged ones: expanded weights leave theirs as they were."""
    changed = {n: g for n, g in gradients.items() if n not in before or not g.equal(before[n])}
    return {n: g - before[n] if n in before else g for n, g in changed.items()}


def _is_of_several_ranks() -> bool:
    """Returns whether gradients of other ranks are added to a rank's own."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _clone(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def _around(cls: type, name: str, function: Callable[..., Any]) -> None:
    """Replaces a method by ``function(original, self, ...)``."""
    original = vars(cls)[name]

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(original, self, *args, **kwargs)

    setattr(cls, name, method)


def _bound(instance: Any, name: str, function: Callable[..., Any]) -> MethodType:
    """Returns a method of one instance that calls `function(original, ...)`. Bound, as PyTorch's schedulers need."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        original = functools.partial(getattr(type(self), name), self)
        return function(original, *args, **kwargs)

    return MethodType(method, instance)
