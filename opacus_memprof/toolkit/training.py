# SPDX-License-Identifier: Apache-2.0
"""A training run in stages, each with what it changed; LoRA training as a whole; and configurations side by side."""

import copy
import gc
import io
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from msgspec import to_builtins
from rich.console import Console
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.profile import Finding, Profile
from opacus_memprof.toolkit import anomalies, lora
from opacus_memprof.toolkit.model import analyze_model
from opacus_memprof.toolkit.output import LOGGER, MB
from opacus_memprof.toolkit.report import report_text
from opacus_memprof.toolkit.snapshots import change_between, memory_snapshot, take

if TYPE_CHECKING:
    from opacus_memprof.session import Session

DEFAULT_LOG_DIR = "logs/training_debug"

P = ParamSpec("P")
R = TypeVar("R")


def memory_profiled_training(log_dir: str | os.PathLike[str] = DEFAULT_LOG_DIR) -> "TrainingProfiler":
    """For a `with` block: stages of a training run are measured, and a report is written at its end.

    Records a session into `log_dir`/profile, for categories and the peak, unless one is running (then it is used) or
    none can be had (then logs why, and goes on without). Attached to it are the models and optimizers that stages are
    handed and return, whatever a PrivacyEngine makes, and optimizers that make their first step.
    """
    return TrainingProfiler(Path(log_dir))


class TrainingProfiler:
    """See `memory_profiled_training`.

    Attributes:
        stages: {"name", "duration_s", "failed", "change" (as `change_between` has it)} of each, in order.
        session: the session that records, or None.
        profile: the content of profile.json, once the block was left; None where no session began here.
    """

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.stages: list[dict[str, Any]] = []
        self.session: Session | None = None
        self.profile: Profile | None = None
        self._own_session = False
        self._history: list[dict[str, Any]] = []
        self._begun = time.monotonic()
        self._follow_optimizers: RemovableHandle | None = None

    def __enter__(self) -> "TrainingProfiler":
        try:
            from opacus_memprof import session
            from opacus_memprof.profiles.directory import DEFAULT_MAX_EVENTS

            self.session = session.current()
            if self.session is None:
                started = session.Session(self.log_dir / "profile", max_events=DEFAULT_MAX_EVENTS)
                started.start()
                self.session, self._own_session = started, True
            from opacus import PrivacyEngine

            self.session.attach(PrivacyEngine)
            self._follow_optimizers = register_optimizer_step_pre_hook(lambda optimizer, *_: self._attach(optimizer))
        except (ImportError, MemprofError) as error:
            LOGGER.warning(f"no session is recorded, so there are no categories: {error}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._follow_optimizers is not None:
            self._follow_optimizers.remove()
        try:
            if self.session is not None and self._own_session:
                from opacus_memprof.session import one_line, outcome

                if error is not None:
                    self.session.explain(error)
                self.profile = self.session.close(*outcome(error), one_line(error))
            self.generate_training_report()
        except MemprofError as failure:  # the training is done, and its result must not be lost over this
            LOGGER.warning(str(failure))

    def profile_stage(self, name: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function and returns its result; notes what the memory in use changed by. Models and optimizers
        among its arguments and in its result are attached to the session. The function's exceptions pass."""
        self._attach(*args, *kwargs.values())
        before = memory_snapshot(f"{name}: start")
        start = time.perf_counter()
        failed = True
        try:
            result = function(*args, **kwargs)
            self._attach(result)
            failed = False
            return result
        finally:
            duration = time.perf_counter() - start
            after = memory_snapshot(f"{name}: end")
            self._history += [before, after]
            change = change_between(before, after)
            self.stages.append({"name": name, "duration_s": duration, "failed": failed, "change": change})

    def _attach(self, *things: object) -> None:
        """Attaches the models, then the optimizers, among these and in lists, dicts and dataclasses of them."""
        if self.session is None or torch.compiler.is_compiling():
            return
        from opacus_memprof.hooks import is_attached

        found = list(_trained(things))
        for thing in sorted(found, key=lambda thing: isinstance(thing, Optimizer)):
            if not is_attached(thing):
                self.session.attach(thing)

    def note(self, name: str) -> None:
        """A reading at a point that comes again in every step: what leaks are found from."""
        self._history.append({**take(), "name": name})

    def memory_issues(self) -> list[Finding]:
        """The findings of the stages and readings so far."""
        return anomalies.in_history(self._history)

    def generate_training_report(self, output_file: str | os.PathLike[str] | None = None) -> str:
        """Each stage's change, the findings and, once the block was left, the profile's summary, as text; written to
        `output_file` (training_report.txt in `log_dir`). Raises MemprofError where it cannot be written."""
        lines = []
        for stage in self.stages:
            lines.append(f"{stage['name']}: {stage['duration_s']:.2f}s{', failed' if stage['failed'] else ''}")
            for change in stage["change"]["gpu_changes"]:
                lines.append(
                    f"  {anomalies.label(change['device'])}: {change['memory_change_mb']:+.2f}MB, "
                    f"peak {change['peak_change_mb']:+.2f}MB"
                )
        report = "\n".join([*lines, "", report_text("training", self._history[-1:], self.memory_issues(), self._begun)])
        if self.profile is not None:
            report += "\n" + _summary(self.profile)
        write_text(self.log_dir / "training_report.txt" if output_file is None else output_file, report)
        return report


def debug_lora_training(
    config: object,
    dataloader: Iterable[Any] | None = None,
    precision: str = "fp32",
    pkg: str | None = None,
    version: str | None = None,
    knowledge_type: str | None = None,
    log_dir: str | os.PathLike[str] = "logs/lora_debug",
    token: str | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Makes a model with LoRA adapters, trains it for one epoch, and says where the memory went.

    Args:
        config: a dict or object; `opacus_memprof.toolkit.lora.Settings` says what of it is used.
        dataloader: of dicts of tensors, (input_ids, labels) or input_ids; None trains on random tokens.
        precision: "fp32", "fp16" or "bf16".
        pkg: what the data is; it stands in the results, among the "labels".
        version: likewise.
        knowledge_type: likewise.
        log_dir: where the report and the profile go.
        token: of the Hugging Face hub; HF_TOKEN without it. Written nowhere.

    Returns:
        The trained model, and {"creation_analysis", "training_analysis" (as `analyze_model`), "memory_issues",
        "stages", "losses", "peak" (device → {"requested_bytes", "categories", ...}; empty without a session of its
        own), "labels", "report_file"}.

    Raises:
        MemprofError: the configuration, the precision or a batch cannot be used, or the model cannot be made.
    """
    chosen = lora.settings(config)
    lora.dtype_of(precision)
    with memory_profiled_training(log_dir) as profiler:
        model = profiler.profile_stage("model_creation", lora.create, chosen, precision, token)
        creation = analyze_model(model, "model creation")
        if dataloader is None:
            dataloader = lora.synthetic_batches(chosen, lora.vocabulary_of(model))
        training = profiler.profile_stage("preparation", lora.prepare, model, dataloader, chosen)
        losses = profiler.profile_stage("training", lora.train, training, precision, lambda: profiler.note("step"))
        trained = analyze_model(model, "training")
        lora.finish(training)
    issues = [*creation["findings"], *trained["findings"], *profiler.memory_issues()]
    devices = profiler.profile.devices if profiler.profile else {}
    return model, {
        "creation_analysis": creation,
        "training_analysis": trained,
        "memory_issues": [issue for index, issue in enumerate(issues) if issue not in issues[:index]],
        "stages": profiler.stages,
        "losses": losses,
        "peak": {device: to_builtins(found.peak) for device, found in devices.items()},
        "labels": {"pkg": pkg, "version": version, "knowledge_type": knowledge_type},
        "report_file": str(Path(log_dir) / "training_report.txt"),
    }


def debug_memory_with_different_configs(
    base_config: object,
    variations: Mapping[str, Mapping[str, Any]],
    precision: str = "fp32",
    log_dir: str | os.PathLike[str] = "logs/config_comparison",
    token: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Debugs LoRA training under each variation of a configuration, on random tokens.

    Args:
        base_config: as `debug_lora_training` takes it.
        variations: name → what differs, in the words of `opacus_memprof.toolkit.lora.Settings`.
        log_dir: each variation's files go to a directory of its name (or number) in it.

    Returns:
        name → {"memory_mb", "total", "trainable", "param_efficiency" (of the model, as `analyze_model`),
        "peak_memory_mb" (of one training run; None without a session of its own), "memory_issues", "config"}.

    Raises:
        MemprofError: there are no variations, or one that changes nothing that is used.
    """
    base = vars(lora.settings(base_config))
    if not isinstance(variations, Mapping) or not variations:
        raise MemprofError('there are no configurations to compare: pass {"small": {"r": 8}, "large": {"r": 32}}')
    for name, variation in variations.items():
        if not isinstance(variation, Mapping):
            raise MemprofError(f'the variation "{name}" cannot be a {type(variation).__name__}: pass a dict')
        if unknown := [key for key in variation if key not in base]:
            raise MemprofError(
                f'the variation "{name}" sets {", ".join(map(str, unknown))}, which nothing uses: use {", ".join(base)}'
            )
    results = {}
    for index, (name, variation) in enumerate(variations.items()):
        directory = Path(log_dir) / (name if name.replace("_", "").replace("-", "").isalnum() else str(index))
        gc.collect()  # the model before is part of cycles, and would count
        config = {**base, **variation}
        config["model"] = copy.deepcopy(config["model"])  # adapters go into the model that is given
        found = debug_lora_training(config, precision=precision, log_dir=directory, token=token)[1]
        analysis = found["creation_analysis"]
        peaks = [peak["requested_bytes"] / MB for peak in found["peak"].values()]
        results[name] = {
            **{key: analysis[key] for key in ("memory_mb", "total", "trainable", "param_efficiency")},
            "peak_memory_mb": max(peaks, default=None),
            "memory_issues": found["memory_issues"],
            "config": dict(variation),
        }
    return results


def _trained(things: Iterable[object]) -> Iterator[nn.Module | Optimizer]:
    for thing in things:
        inside = _elements(thing)
        for one in (thing,) if inside is None else inside:
            if isinstance(one, Optimizer) or (isinstance(one, nn.Module) and any(True for _ in one.parameters())):
                yield one


def _elements(thing: object) -> Iterable[object] | None:
    if isinstance(thing, (list, tuple)):
        return thing
    if isinstance(thing, Mapping):
        return thing.values()
    return vars(thing).values() if is_dataclass(thing) and not isinstance(thing, type) else None


def _summary(profile: Profile) -> str:
    from opacus_memprof.reports.text import print_summary

    text = io.StringIO()
    print_summary(profile, Console(file=text, width=100, force_jupyter=False))
    return text.getvalue()
