# SPDX-License-Identifier: Apache-2.0
"""Runs forward, backward and clipping as a CUDA graph, for models whose steps are limited by the host."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus_memprof.clipping.arguments import is_checked
from opacus_memprof.clipping.bookkeeping.backward_pass import NormCheck, refuse_capture
from opacus_memprof.clipping.kernels.native import begin_tables_of_graph, end_tables_of_graph
from opacus_memprof.clipping.module.hooks import FlashClipHooks
from opacus_memprof.clipping.optimizers.optimizer import DPOptimizerFlashClip
from opacus_memprof.errors import MemprofError

_WARM_UPS = 3  # as torch.cuda.make_graphed_callables has


class GraphedBackward:
    """Computes a loss, its backward and the clipped sums by replaying a CUDA graph, with one call on the host.

    Noise, the accountant and the update stay in `optimizer.step()`, which is called as always. The check that gradient
    norms are finite stays there, too. Some batches run without the graph: batches whose shapes differ from the
    example's, as the last one of a Poisson sampler; all batches while the model or the clipping differs from the
    captured state; and the steps in which a proof is repeated, or the program's own computations are checked: the first
    three at least, unless `check` is "off" or "first".

    The graph has memory of its own for as long as this object lives: as much as a step needs in addition to the model.

    Args:
        module: the module that make_private returned, on one GPU, in training mode.
        optimizer: the optimizer that make_private returned.
        compute_loss: called with a batch; it calls the module and returns the loss, without its backward.
        example: the arguments of `compute_loss` for one batch, as a tuple. Its tensors are on the module's device.

    Raises:
        MemprofError: the module is not a flash_clip module, is not on exactly one GPU, or clips adaptively; gradients
            are waiting for a step; or `compute_loss` or a layer cannot be captured. Training can continue without the
            graph.
    """

    def __init__(
        self,
        module: FlashClipHooks,
        optimizer: DPOptimizerFlashClip,
        compute_loss: Callable[..., torch.Tensor],
        example: tuple[Any, ...],
    ) -> None:
        if type(optimizer) is not DPOptimizerFlashClip:
            raise MemprofError(
                'a graphed backward needs grad_sample_mode="flash_clip" on one GPU, with clipping "flat", "per_layer" '
                f'or "automatic"; this optimizer is a {type(optimizer).__name__}.'
            )
        if optimizer.bookkeeping.nonfinite == "drop":
            raise MemprofError(
                "a graphed backward cannot drop samples whose norm is not finite: the host would need the norms; "
                "use flash_clip_nonfinite='refuse', or run backward without the graph."
            )
        self._compute_loss, self._optimizer, self._module = compute_loss, optimizer, module
        self._model = module.registry.model
        self._bookkeeping = optimizer.bookkeeping
        leaves, self._structure = tree_flatten(example)
        device = optimizer.params[0].device
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if device.type != "cuda" or not tensors or any(tensor.device != device for tensor in tensors):
            raise MemprofError(
                f"a graphed backward needs a model and a batch on one CUDA device; the model is on {device}, the batch "
                f"on {', '.join(sorted({str(tensor.device) for tensor in tensors})) or 'none'}."
            )
        if self._bookkeeping.passes or any(parameter.summed_grad is not None for parameter in optimizer.params):
            raise MemprofError(
                "gradients are waiting for a step: call optimizer.zero_grad() before a backward is graphed."
            )
        self._inputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._last_sums: dict[nn.Parameter, torch.Tensor] = {}
        with torch.cuda.device(device):
            self._warm_up()
            self._situation = module.last_situation
            self._capture()
        module.forget_calls()  # no loop ran between these calls, which could have kept something for the next one
        self._state = self._captured_state()

    def __call__(self, *batch: Any) -> torch.Tensor:
        """Runs `compute_loss(*batch)` and its backward, and returns the detached loss."""
        leaves, structure = tree_flatten(batch)
        is_alike = structure == self._structure and all(map(_is_alike, leaves, self._inputs))
        if not is_alike or self._captured_state() != self._state or self._is_check_due():
            loss = self._compute_loss(*batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()
        refuse_capture()
        if self._situation is not None:
            self._situation.forwards += 1
        self._keep_sums()
        for own, leaf in zip(self._inputs, leaves, strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(leaf, non_blocking=True)
        self._graph.replay()
        # The Python attributes of these objects describe only this step.
        self._last_sums = {parameter: total.detach() for parameter, total in self._sums.items()}
        check = NormCheck(self._check.norms.clone(), self._check.squared_norms.clone(), self._check.owners)
        check.begin()
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._bookkeeping.add_clipped(len(check.norms), self._last_sums, check, tensors)
        return self._loss.clone()

    def _is_check_due(self) -> bool:
        """Returns whether the next forward must repeat a proof, or be followed to the next step: a replay cannot."""
        situation = self._situation
        is_proved_again = situation is not None and is_checked(self._module.situations.check, situation.forwards + 1)
        return is_proved_again or self._module.parts.is_due()

    def _captured_state(self) -> tuple[Any, ...]:
        """Returns the state that a replay repeats as it was captured.

        This is the clipping rule; modes, hooks and attributes of modules; and the addresses of the trained parameters.
        """
        rule = self._bookkeeping.rule
        parameters = [(p.requires_grad, p.data_ptr()) for p in self._model.parameters()]
        return rule.bound, rule.bounds.copy(), self._module.modes(), parameters

    def _keep_sums(self) -> None:
        """Copies the sums of the last replay that a step still needs, because the next replay overwrites them.

        This is the case for physical batches, whose sums add up to one step.
        """
        self._bookkeeping.copy_sums(self._last_sums)
        parameter: Any  # with Opacus' attributes
        for parameter, given in self._last_sums.items():
            # Sums that a step has already used stay, so that the next step refuses them, as without a graph.
            if parameter.summed_grad is given and not hasattr(given, "_processed"):
                parameter.summed_grad = given.clone()

    def _run(self) -> None:
        """Runs forward, backward and clipping of the example."""
        self._sums: dict[nn.Parameter, torch.Tensor] = {}  # the sums of a warm-up are not needed
        loss = self._compute_loss(*tree_unflatten(self._inputs, self._structure))
        loss.backward()  # type: ignore[no-untyped-call]
        if self._bookkeeping.passes != 1:
            raise MemprofError("compute_loss must return a loss of the module's output, and not run its backward.")
        self._module.begin_step()
        self._loss = loss.detach()
        self._optimizer.clip_and_accumulate()
        parameter: Any  # with Opacus' attributes
        for parameter in self._optimizer.params:
            self._sums[parameter], parameter.summed_grad = parameter.summed_grad, None
        self._check = self._bookkeeping.take_norm_check()
        self._bookkeeping.begin_step()  # the next run has the same samples

    def _warm_up(self) -> None:
        """Runs the example to initialize libraries and kernels. Restores buffers and random number generators."""
        before = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        stream = _stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.random.fork_rng([torch.cuda.current_device()]), torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    self._run()
        finally:
            self._drop()
        # Pinned memory that is freed during a capture breaks replays ("invalid argument"), so it is freed now.
        del self._loss, self._sums, self._check
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)

    def _capture(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._bookkeeping.is_captured = True
        numbers = 64 * (len(self._optimizer.params) + 16)  # a few tables have a few numbers for each parameter
        begin_tables_of_graph(torch.empty(numbers, dtype=torch.int64, device=self._optimizer.params[0].device))
        pool = torch.cuda.graph_pool_handle()
        self._module.layer_hooks.renew_anchors()
        try:
            # "thread_local": other threads, such as a data loader's, may make calls that a capture forbids.
            with torch.cuda.graph(self._graph, pool, capture_error_mode="thread_local"):
                self._run()
        except Exception as error:
            _end_failed_capture(torch.cuda.current_device(), pool)
            raise MemprofError(f"compute_loss, or a layer, cannot be captured in a CUDA graph ({error}).") from error
        finally:
            self._tables = end_tables_of_graph()  # the graph reads these tables
            self._bookkeeping.is_captured = False
            self._drop()
        for table, rows in self._tables:
            table.copy_(rows)

    def _drop(self) -> None:
        """Drops the sums that a failed run has left for a step."""
        self._bookkeeping.clear()
        self._bookkeeping.begin_step()
        parameter: Any  # with Opacus' attributes
        for parameter in self._optimizer.params:
            parameter.summed_grad = None


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    """Returns the stream of warm-ups. All graphs share it, because libraries allocate a workspace for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _end_failed_capture(device: int, pool: Any) -> None:
    """Ends a capture that has failed, where torch does not (pytorch/pytorch#171263).

    Otherwise its generator would refuse to draw numbers, and memory that several streams have used would not be freed.
    """
    with contextlib.suppress(RuntimeError):  # torch has ended it
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):  # its end also detaches the generator from the failed capture
        torch.zeros(1, device=device)


def _is_alike(leaf: Any, own: Any) -> bool:
    """Returns whether a leaf of a batch has the shape, dtype and device of the example's leaf."""
    if not isinstance(leaf, torch.Tensor) or not isinstance(own, torch.Tensor):
        return type(leaf) is type(own) and bool(leaf == own)
    return (leaf.shape, leaf.dtype, leaf.device) == (own.shape, own.dtype, own.device)
