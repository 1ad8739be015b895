# SPDX-License-Identifier: Apache-2.0
"""Training steps with their times, and snapshots after forward, backward and the optimizer."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor

from opacus_memprof.experiments.configuration import Configuration
from opacus_memprof.session import tag


@dataclass(frozen=True)
class Batch:
    """A physical batch on the CPU, its weight in the logical batch's loss, and whether it is the logical one's last."""

    tokens: Tensor
    targets: Tensor
    weight: float
    last: bool


def plain_batches(loader: Any, physical: int) -> Iterator[Batch]:
    """Yields logical batches, split into physical ones whose gradients accumulate."""
    for tokens, targets in loader:
        count = -(-len(tokens) // physical)
        parts = list(zip(tokens.tensor_split(count), targets.tensor_split(count), strict=True))
        for index, (part, part_targets) in enumerate(parts):
            yield Batch(part, part_targets, len(part) / len(tokens), index + 1 == count)


def private_batches(loader: Any, configuration: Configuration, optimizer: Any) -> Iterator[Batch]:
    """Yields logical batches, split by Opacus' BatchMemoryManager. Its optimizer weights them, and knows the last."""
    physical, count = (
        configuration.physical_batch_size,
        -(-configuration.batch_size // configuration.physical_batch_size),
    )
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer) as batches:
        for index, (tokens, targets) in enumerate(batches):
            yield Batch(tokens, targets, 1.0, (index + 1) % count == 0)


class Stopwatch:
    """Adds up the times between `start` and `stop`.

    On CUDA it uses events in the stream, so that only `seconds` waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._parts: list[tuple[Any, Any]] = []
        self._started: Any = None

    def start(self) -> None:
        self._started = self._now()

    def stop(self) -> None:
        self._parts.append((self._started, self._now()))

    def seconds(self) -> float:
        """Returns the sum of the times since the last call, in seconds."""
        parts, self._parts = self._parts, []
        if not self._cuda:
            return float(sum(end - start for start, end in parts))
        torch.cuda.synchronize()
        return float(sum(start.elapsed_time(end) for start, end in parts)) / 1000

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


@dataclass
class Trainer:
    """Trains a model by physical batches. Opacus requires that its optimizers are stepped and cleared for each."""

    module: Any
    optimizer: Any
    criterion: Any
    mode: str
    device: torch.device
    snapshot: Callable[[str], object]

    def __post_init__(self) -> None:
        self._watch = Stopwatch(self.device)

    def step(self, batch: Batch, name: str) -> float | None:
        """Trains on one physical batch.

        After the last physical batch of a logical step, returns the seconds of that step, without those of snapshots;
        otherwise returns None.
        """
        snapshot = self.snapshot if batch.last else lambda name: None
        self._watch.start()
        with tag("inputs"):
            tokens, targets = batch.tokens.to(self.device), batch.targets.to(self.device)
        loss = self._loss(tokens, targets)
        if batch.weight != 1:
            loss = loss * batch.weight
        self._watch.stop()
        snapshot(f"{name}_forward")
        self._watch.start()
        loss.backward()
        self._watch.stop()
        snapshot(f"{name}_backward")
        if batch.last or self.mode != "vanilla":
            self._watch.start()
            self.optimizer.step()
            self._watch.stop()
            snapshot(f"{name}_optimizer")
            self._watch.start()
            self.optimizer.zero_grad()
            self._watch.stop()
        return self._watch.seconds() if batch.last else None

    def _loss(self, tokens: Tensor, targets: Tensor) -> Any:
        logits = self.module(tokens)
        # The criterion of ghost clipping needs to know which tokens belong to a sample.
        extra = {"shape": logits.shape} if self.mode == "ghost" and logits.dim() == 3 else {}
        return self.criterion(logits.flatten(0, -2), targets.flatten(), **extra)
