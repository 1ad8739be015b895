# SPDX-License-Identifier: Apache-2.0
"""A training run in stages, each with what it changed; LoRA training as a whole; and configurations side by side."""

import copy
import gc
import io
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from rich.console import Console
from torch import nn

from opacus_memprof.errors import MemprofError
from opacus_memprof.files import write_text
from opacus_memprof.toolkit import anomalies, lora
from opacus_memprof.toolkit.model import analyze_model
from opacus_memprof.toolkit.output import MB, say
from opacus_memprof.toolkit.snapshots import change_between, memory_snapshot, report_text, take

if TYPE_CHECKING:
    from opacus_memprof.session import Session

DEFAULT_LOG_DIR = "logs/training_debug"

P = ParamSpec("P")
R = TypeVar("R")


def memory_profiled_training(log_dir: str | os.PathLike[str] = DEFAULT_LOG_DIR) -> "TrainingProfiler":
    """For a `with` block: stages of a training run are measured, and a report is written at its end.

    Records a session into `log_dir`/profile, for categories and the peak, unless one is running (then it is used) or
    none can be had (then says why, and goes on without).
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
        self.profile: dict[str, Any] | None = None
        self._own_session = False
        self._history: list[dict[str, Any]] = []

    def __enter__(self) -> "TrainingProfiler":
        try:
            from opacus_memprof import session
            from opacus_memprof.directory import DEFAULT_MAX_EVENTS

            self.session = session.current()
            if self.session is None:
                started = session.Session(self.log_dir / "profile", max_events=DEFAULT_MAX_EVENTS)
                started.start()
                self.session, self._own_session = started, True
        except (ImportError, MemprofError) as error:
            say(f"no session is recorded, so there are no categories: {error}", logging.WARNING)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self.session is not None and self._own_session:
                from opacus_memprof.session import one_line, outcome

                if error is not None:
                    self.session.explain(error)
                self.profile = self.session.close(*outcome(error), one_line(error))
            self.generate_training_report()
        except MemprofError as failure:  # the training is done, and its result must not be lost over this
            say(str(failure), logging.WARNING)

    def profile_stage(self, name: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function and returns its result; notes what the memory in use changed by. Its exceptions pass."""
        before = memory_snapshot(f"{name}: start")
        start = time.perf_counter()
        failed = True
        try:
            result = function(*args, **kwargs)
            failed = False
            return result
        finally:
            duration = time.perf_counter() - start
            after = memory_snapshot(f"{name}: end")
            self._history += [before, after]
            change = change_between(before, after)
            self.stages.append({"name": name, "duration_s": duration, "failed": failed, "change": change})

    def note(self, name: str) -> None:
        """A reading at a point that comes again in every step: what leaks are found from."""
        self._history.append({**take(), "name": name})

    def memory_issues(self) -> list[dict[str, Any]]:
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
        report = "\n".join([*lines, "", report_text("training", self._history[-1:], self.memory_issues())])
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
        pkg, version, knowledge_type: what the data is; they stand in the results, as "labels".
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
        if profiler.session is not None:
            from opacus import PrivacyEngine

            profiler.session.attach(PrivacyEngine)
        model = profiler.profile_stage("model_creation", lora.create, chosen, precision, token)
        creation = analyze_model(model, "model creation")
        if dataloader is None:
            dataloader = lora.synthetic_batches(chosen, lora.vocabulary_of(model))
        training = profiler.profile_stage("preparation", lora.prepare, model, dataloader, chosen)
        if profiler.session is not None and chosen.noise_multiplier is None:
            profiler.session.attach(training.model, training.optimizer)
        losses = profiler.profile_stage("training", lora.train, training, precision, lambda: profiler.note("step"))
        trained = analyze_model(model, "training")
        lora.finish(training)
    issues = [*creation["findings"], *trained["findings"], *profiler.memory_issues()]
    devices = (profiler.profile or {}).get("devices", {})
    return model, {
        "creation_analysis": creation,
        "training_analysis": trained,
        "memory_issues": [issue for index, issue in enumerate(issues) if issue not in issues[:index]],
        "stages": profiler.stages,
        "losses": losses,
        "peak": {device: found["peak"] for device, found in devices.items()},
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


def _summary(profile: Mapping[str, Any]) -> str:
    from opacus_memprof.reports.text import print_summary

    text = io.StringIO()
    print_summary(profile, Console(file=text, width=100))
    return text.getvalue()
