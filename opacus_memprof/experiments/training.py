# SPDX-License-Identifier: Apache-2.0
"""Trains one configuration under a profiling session, with times and snapshots of its steps.

In several processes, FSDP2 shards the model over them.
"""

import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.fsdp_utils import FSDP2Wrapper
from torch import Tensor, nn

from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments import data, models
from opacus_memprof.experiments.configuration import Configuration
from opacus_memprof.experiments.result import ProgressLog, build_result
from opacus_memprof.language import tr, tr_sentence
from opacus_memprof.profiles.directory import DEFAULT_MAX_EVENTS
from opacus_memprof.profiles.experiment_result import DataSource, ExperimentResult
from opacus_memprof.profiles.units import format_bytes, megabytes
from opacus_memprof.session import Session, one_line, outcome, tag
from opacus_memprof.session.privacy_engine import PrivacyEngine

_GLOO_EXIT_SECONDS = 0.2


def train(configuration: Configuration, profile_directory: Path) -> ExperimentResult:
    """Trains, with the profile in `profile_directory`, and returns the result (docs/experiments.md).

    A failure is a result too: its `status` is "out_of_memory" or "failed", and its `error` is a sentence.
    """
    progress = ProgressLog()
    error: Exception | None = None
    profile = None
    own = profile_directory
    session = Session(profile_directory, device=configuration.device, max_events=DEFAULT_MAX_EVENTS)
    try:
        session.start()
        own = session.directory
        try:
            _Run(configuration, session, progress).train()
        except Exception as failure:
            error = failure
            if not isinstance(failure, MemprofError):
                traceback.print_exc()
        profile = session.close(*outcome(error), one_line(error))
        with megabytes():
            profile.findings = session.findings()
    except MemprofError as failure:  # the session could not begin, or could not be written
        error = error or failure
    return build_result(configuration, progress, profile, profile_directory, error, own)


class _Run:
    """The stages of one run."""

    def __init__(self, configuration: Configuration, session: Session, progress: ProgressLog) -> None:
        self._configuration = configuration
        self._session = session
        self._progress = progress
        self._numbers = count()

    def train(self) -> None:
        """Sets up and trains."""
        configuration, progress = self._configuration, self._progress
        self._device = torch.device(self._session.device)
        if configuration.nproc > 1:
            progress.begin("joining the other processes")
            self._device = join_group(self._session.device)
        progress.begin("loading the model")
        model = models.build_model(configuration, self._device)
        self._session.attach(model)
        progress.parameters = counted = models.count_parameters(model)
        progress.detail(tr("{total:,} parameters, of which {trainable:,} are trained", **counted))
        self._snapshot("model_loaded")

        progress.begin("preparing the data")
        loaded = data.load_data(configuration, models.vocabulary_size(model), getattr(model, "padding", None))
        progress.data = DataSource(source=loaded.source, reason=loaded.reason)
        progress.detail(tr_sentence(loaded.reason))
        self._snapshot("data_prepared")

        if configuration.nproc > 1:
            progress.begin("sharding the model")
            model = FSDP2Wrapper(model)  # every layer separately, as Opacus requires
            self._session.attach(model)
            self._snapshot("fsdp_wrapped")

        progress.begin("setting up the optimizer")
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer: Any = torch.optim.Adam(trained, lr=configuration.learning_rate)
        self._session.attach(optimizer)
        self._snapshot("optimizer_set_up")

        module: Any = model
        criterion: Any = nn.CrossEntropyLoss()
        if configuration.mode == "vanilla":
            batches = plain_batches(loaded.loader, configuration.physical_batch_size)
        else:
            progress.begin("setting up the privacy engine")
            module, optimizer, criterion, loader = self._make_private(model, optimizer, criterion, loaded.loader)
            batches = private_batches(loader, configuration, optimizer)
            self._snapshot("privacy_engine_set_up")
        trainer = Trainer(module, optimizer, criterion, configuration.mode, self._device, self._snapshot)

        progress.begin("training")
        for batch in batches:
            step = progress.steps_completed - configuration.warmup_steps
            name = f"step_{step}" if step >= 0 else f"warmup_{progress.steps_completed}"
            seconds = trainer.step(batch, name)
            if seconds is not None:
                progress.step_ended(seconds, configuration)

    def _make_private(self, model: nn.Module, optimizer: Any, criterion: nn.Module, loader: Any) -> Any:
        configuration = self._configuration
        prepared = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=loader,
            noise_multiplier=configuration.sigma,
            max_grad_norm=configuration.max_grad_norm,
            poisson_sampling=False,  # only batches of one size can be compared
            grad_sample_mode=configuration.grad_sample_mode,
        )
        return tuple(prepared) if configuration.mode == "ghost" else (*prepared[:2], criterion, prepared[2])

    @megabytes()
    def _snapshot(self, name: str) -> None:
        snapshot = self._session.snapshot(f"{next(self._numbers)}_{name}")
        live = sum(count.requested_bytes for count in snapshot.devices.values())
        self._progress.detail(
            tr("{name}: {size} live", name=tr_sentence(name.replace("_", " ")), size=format_bytes(live))
        )


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


def join_group(device: str) -> torch.device:
    """Joins the process group, and returns the device of this process. Raises the errors of torch.distributed.

    Raises:
        MemprofError: there are fewer GPUs than processes.
    """
    if device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if own.index >= torch.cuda.device_count():
        raise MemprofError(f"there are {torch.cuda.device_count()} GPUs: use at most as many processes")
    torch.cuda.set_device(own)
    dist.init_process_group("nccl", device_id=own)
    return own


def leave_group() -> None:
    """Leaves the process group. The process may end then."""
    if not dist.is_initialized():
        return
    backend = dist.get_backend()
    dist.destroy_process_group()
    if backend == "gloo":
        # gloo's threads, which DTensor's caches keep running, free a collective's tensors some time after its result is
        # ready. If Python ends while such a thread waits for the GIL, the process aborts.
        time.sleep(_GLOO_EXIT_SECONDS)
