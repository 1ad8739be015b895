# SPDX-License-Identifier: Apache-2.0
"""Checks what becomes of the noised sum in a logical step: the gradients, their divisor, and the update."""

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from torch import nn

from opacus_memprof.loop_check.by_hand import is_close
from opacus_memprof.loop_check.records import Findings, LogicalStep, PrivateModel, first_line, listed, physical_batches


class UpdateCheck:
    """Checks the gradients that the original optimizer uses, and the parameters after its step.

    Args:
        optimizer: the private optimizer.
        root: the private model that it trains.
        step: the recorded data.
        trained: the parameters of the model that the optimizer holds, by name.
        findings: receives the defects and notes.
    """

    def __init__(
        self,
        optimizer: DPOptimizer,
        root: PrivateModel,
        step: LogicalStep,
        trained: dict[str, nn.Parameter],
        findings: Findings,
    ) -> None:
        self._optimizer = optimizer
        self._root = root
        self._step = step
        self._trained = trained
        self._findings = findings
        self._replica: Any = None
        self._before: dict[str, torch.Tensor] = {}
        self._changed: set[str] = set()  # whose gradients are no longer the noised ones

    def check_parameters(self, left: Mapping[str, torch.Tensor]) -> None:
        """Finds parameters and buffers, which are published with the model, that have changed since the step before.

        Args:
            left: their values after the step before, by name.
        """
        self._before = {name: x.detach().clone() for name, x in self._root.published().items()}
        moved = [name for name, x in self._before.items() if name in left and not is_same(x, left[name])]
        if moved:
            self._findings.not_checked(
                f"what has changed {listed(moved)} outside of the optimizer's step",
                "values that depend on data are neither clipped nor noised there.",
                "moved",
            )

    def check_gradients(self) -> None:
        """Finds gradients that are no longer those to which the optimizer has added noise."""
        changed: list[str] = []
        noiseless: list[str] = []
        for name, p in self._trained.items():
            noised, summed = self._step.noised.get(id(p)), self._step.summed.get(id(p))
            if noised is None or p.grad is None:
                continue
            left = self._step.scaled.get(id(p), 0.0)
            is_scaled = abs(float(p.grad.double().norm()) - left) > _precision(p.dtype) * left
            is_turned = 1 - _cosine(p.grad, noised) > _rounding(p.dtype)
            if not (is_scaled or is_turned):
                continue
            self._changed.add(name)
            has_noise = summed is None or self._step.std == 0 or not _lacks_noise(p.grad, noised, summed)
            is_noiseless = is_turned and not has_noise
            (noiseless if is_noiseless else changed).append(name)
        if noiseless:
            self._findings.defect(
                f"The script replaces the gradients of {listed(noiseless)} by others without noise before the update.",
                "no noise",
            )
        if changed:
            self._findings.not_checked(
                f"what has changed the gradients of {listed(changed)} after noise was added",
                "values that depend on data are neither clipped nor noised there.",
                "gradients",
            )

    def check_divisor(self) -> None:
        """Compares the divisor of the noised sum with the expected number of samples of a logical batch."""
        ratios = []
        for name, p in self._trained.items():
            noised = self._step.noised.get(id(p)) if name not in self._changed else None
            if noised is not None and p.grad is not None and float(p.grad.norm()) > 0:
                ratios.append((float(noised.double().norm()) / float(p.grad.double().norm()), p.dtype))
        if not ratios:
            return
        passes, expected = max(1, self._step.accumulated), self.expected_divisor()
        found = sorted(ratio for ratio, _ in ratios)[len(ratios) // 2]
        model, optimizer = self._root.hooks.loss_reduction, self._optimizer.loss_reduction
        why = f" The model has loss_reduction={model!r}, but the optimizer {optimizer!r}." if model != optimizer else ""
        if abs(found / expected - 1) > max(_precision(dtype) for _, dtype in ratios):
            self._findings.defect(
                f"The noised sum is divided by {found:.4g}, not by {expected:.4g} (expected_batch_size "
                f"{self._optimizer.expected_batch_size} * {physical_batches(passes)} accumulated): "
                f"the update is {expected / found:.3g} times as large as with the {model} over the samples." + why,
                "divisor",
            )

    def expected_divisor(self) -> float:
        """Returns the divisor of the noised sum for a loss that is reduced as declared."""
        if self._root.hooks.loss_reduction == "sum":
            return 1.0
        return float(self._optimizer.expected_batch_size) * max(1, self._step.accumulated)

    def repeat_update(self) -> None:
        """Repeats the original optimizer's step on copies of the parameters and of its state."""
        original = self._optimizer.original_optimizer
        try:
            replica = copy.deepcopy(original)
            for group, live in zip(replica.param_groups, original.param_groups, strict=True):
                for p, q in zip(group["params"], live["params"], strict=True):
                    p.grad = None if q.grad is None else q.grad.clone()
            type(original).step(replica)
        except Exception as error:  # optimizers can hold anything
            self._findings.not_checked("the update", f"the optimizer cannot be copied ({first_line(error)}).", "update")
            return
        self._replica = replica

    def after_update(self) -> dict[str, torch.Tensor]:
        """Compares the parameters with the repeated update, and finds parameters that did not change.

        Returns:
            The values of the model's parameters and buffers, by name.
        """
        live = self._optimizer.original_optimizer.param_groups
        names = self._root.names()
        if self._replica is not None:
            pairs = [
                (names.get(id(q), "a parameter"), p, q)
                for group, other in zip(self._replica.param_groups, live, strict=True)
                for p, q in zip(group["params"], other["params"], strict=True)
            ]
            wrong = [name for name, p, q in pairs if not is_close(q.detach(), p.detach())]
            if wrong:
                self._findings.defect(
                    f"Something else changes {listed(wrong)} in the step of "
                    f"{type(self._optimizer.original_optimizer).__name__}: it computes other values from the "
                    "noised gradients.",
                    "update",
                )
        rates = {id(p): float(group.get("lr", 1.0)) for group in live for p in group["params"]}
        still, lacking, idle = [], [], []
        for name, p in self._root.trained().items():
            if not torch.equal(p.detach(), self._before[name]):
                continue
            if id(p) not in rates:
                lacking.append(name)
            elif rates[id(p)] == 0:
                idle.append(name)
            elif p.grad is None or not bool(p.grad.any()):
                still.append(name)
            else:
                self._findings.note(f"{name} did not move: the update is smaller than the rounding of {p.dtype}.")
        if lacking:
            self._findings.defect(
                f"{listed(lacking)} can be trained, but the private optimizer does not hold "
                f"{'them, so that they are' if len(lacking) > 1 else 'it, so that it is'} never updated: make the "
                "optimizer from the parameters of the model that is trained, after its last layer was replaced."
            )
        if still:
            self._findings.defect(f"{listed(still)} got no gradient, not even noise, and did not move in the step.")
        if idle:
            self._findings.not_checked(f"the update of {listed(idle)}", "the learning rate was 0 in a step.", "rate")
        return {name: x.detach().clone() for name, x in self._root.published().items()}


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors have the same shape and values, NaN included."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the cosine between two tensors; 1 between zeros."""
    x, y = a.detach().double().flatten(), b.detach().double().flatten()
    sizes = float(x.norm()), float(y.norm())
    return float(x @ y) / (sizes[0] * sizes[1]) if all(sizes) else float(sizes[0] == sizes[1])


def _precision(dtype: torch.dtype) -> float:
    """Returns the relative difference of two norms that is no more than rounding."""
    return 10 * torch.finfo(dtype).eps + 1e-4


def _rounding(dtype: torch.dtype) -> float:
    """Returns by how much the cosine of a tensor and its rounding can be below 1."""
    return 1e-9 + 10 * torch.finfo(dtype).eps ** 2


def _lacks_noise(gradient: torch.Tensor, noised: torch.Tensor, summed: torch.Tensor) -> bool:
    """Returns whether a gradient is the sum without noise, or has little of the noise in a sum of many numbers."""
    if 1 - _cosine(gradient, summed) <= _rounding(gradient.dtype):
        return True
    noise = noised.double() - summed.double().reshape(noised.shape)
    share = _cosine(noised, noise)
    return share > 12 / math.sqrt(noise.numel()) and _cosine(gradient, noise) < share / 2
