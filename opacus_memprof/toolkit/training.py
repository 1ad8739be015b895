# SPDX-License-Identifier: Apache-2.0
"""Profiles the stages of a training run, and debugs LoRA training with one or several configurations."""

import copy
import gc
import io
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict, TypeVar

import torch
from msgspec import to_builtins
from rich.console import Console
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from opacus_memprof.errors import MemprofError
from opacus_memprof.language import checked, in_language, localized, tr
from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.profile import Finding, Profile
from opacus_memprof.toolkit import anomalies, lora
from opacus_memprof.toolkit.model import analyze_model
from opacus_memprof.toolkit.output import LOGGER, MB
from opacus_memprof.toolkit.readings import MemorySnapshot, SnapshotDifference
from opacus_memprof.toolkit.snapshots import difference_around_call, memory_snapshot, report_text, take_snapshot

if TYPE_CHECKING:
    from opacus_memprof.session import Session

DEFAULT_LOG_DIR = "logs/training_debug"

P = ParamSpec("P")
R = TypeVar("R")


class Stage(TypedDict):
    """One stage of a training run, and the change of the memory in use."""

    name: str
    duration_s: float
    failed: bool
    change: SnapshotDifference


def memory_profiled_training(
    log_dir: str | os.PathLike[str] = DEFAULT_LOG_DIR, device: str = "auto", language: str | None = None
) -> "TrainingProfiler":
    """A context manager that measures the stages of a training run, and writes a report at the end of its block.

    Uses the running session, or records one into `log_dir`/profile, for categories and the peak. If that is not
    possible, it logs the reason and continues without. It attaches the models and optimizers among arguments and
    results of stages, results of a PrivacyEngine, and optimizers at their first step.

    Args:
        log_dir: the directory of the report and the profile.
        device: what a session of its own records: "auto" (CUDA if there is a GPU), "cuda" or "cpu".
        language: "en" or "zh", of log lines, the report and findings; None: the process' language.

    Raises:
        MemprofError: there is no such language.
    """
    return TrainingProfiler(Path(log_dir), device, language)


class TrainingProfiler:
    """The profiler that `memory_profiled_training` returns.

    Attributes:
        stages: for each stage, in order, {"name", "duration_s", "failed", "change" (see `difference_around_call`)}.
        session: the session that records, or None.
        profile: the content of profile.json, after the block; None if no session began here.
    """

    def __init__(self, log_dir: Path, device: str = "auto", language: str | None = None) -> None:
        self.language = None if language is None else checked(language)
        self.log_dir = log_dir
        self._device = device
        self.stages: list[Stage] = []
        self.session: Session | None = None
        self.profile: Profile | None = None
        self._own_session = False
        self._history: list[MemorySnapshot] = []
        self._start_time = time.monotonic()
        self._follow_optimizers: RemovableHandle | None = None

    @localized
    def __enter__(self) -> "TrainingProfiler":
        try:
            from opacus_memprof import session
            from opacus_memprof.profiles.directory import DEFAULT_MAX_EVENTS

            self.session = session.current()
            if self.session is None:
                started = session.Session(self.log_dir / "profile", device=self._device, max_events=DEFAULT_MAX_EVENTS)
                started.start()
                self.session, self._own_session = started, True
            from opacus import PrivacyEngine

            self.session.attach(PrivacyEngine)
            self._follow_optimizers = register_optimizer_step_pre_hook(lambda optimizer, *_: self._attach(optimizer))
        except (ImportError, MemprofError) as error:
            LOGGER.warning(tr("no session is recorded, so there are no categories: {error}", error=error))
        return self

    @localized
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
        except MemprofError as failure:  # the training is done, and its result must not be lost because of this
            LOGGER.warning(str(failure))

    def profile_stage(self, name: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function, returns its result, and adds a stage with the change of the memory in use.

        Models and optimizers among the arguments and in the result are attached to the session. The function's
        exceptions pass unchanged.
        """
        self._attach(*args, *kwargs.values())
        with in_language(self.language):
            before = memory_snapshot(tr("{name}: start", name=name))
        start = time.perf_counter()
        failed = True
        try:
            result = function(*args, **kwargs)
            self._attach(result)
            failed = False
            return result
        finally:
            duration = time.perf_counter() - start
            with in_language(self.language):
                after = memory_snapshot(tr("{name}: end", name=name))
                self._history += [before, after]
                change = difference_around_call(before, after)
            self.stages.append({"name": name, "duration_s": duration, "failed": failed, "change": change})

    def _attach(self, *objects: object) -> None:
        """Attaches the models, then the optimizers, among the objects and in lists, dicts and dataclasses of them."""
        if self.session is None or torch.compiler.is_compiling():
            return
        import opacus  # noqa: F401  # first, as in Session.attach

        from opacus_memprof.hooks import is_attached

        for trainable in sorted(_find_trainable(objects), key=lambda each: isinstance(each, Optimizer)):
            if not is_attached(trainable):
                self.session.attach(trainable)

    def note(self, name: str) -> None:
        """Adds a reading at a point that every step passes, from which leaks are found."""
        self._history.append({**take_snapshot(), "name": name})

    @localized
    def memory_issues(self) -> list[Finding]:
        """Returns the findings of all stages and readings so far."""
        return anomalies.find_in_history(self._history)

    @localized
    def generate_training_report(self, output_file: str | os.PathLike[str] | None = None) -> str:
        """Returns the text of a report: changes of all stages, findings and, after the block, the profile's summary.

        Args:
            output_file: the file to which it is written; default: training_report.txt in `log_dir`.

        Raises:
            MemprofError: the file cannot be written.
        """
        lines = []
        for stage in self.stages:
            failed = tr(", failed") if stage["failed"] else ""
            lines.append(f"{stage['name']}: {stage['duration_s']:.2f}s{failed}")
            for change in stage["change"]["gpu_changes"]:
                lines.append(
                    tr(
                        "  {device}: {size:+.2f}MB, peak {peak:+.2f}MB",
                        device=anomalies.device_label(change["device"]),
                        size=change["memory_change_mb"],
                        peak=change["peak_change_mb"],
                    )
                )
        report = "\n".join(
            [*lines, "", report_text(tr("training"), self._history[-1:], self.memory_issues(), self._start_time)]
        )
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
    device: str = "auto",
    language: str | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Creates a model with LoRA adapters, trains it for one epoch, and reports its memory by stage and category.

    Args:
        config: a dict or object with the settings of `opacus_memprof.toolkit.lora.Settings`; others are ignored.
        dataloader: yields dicts of tensors, (input_ids, labels) or input_ids; None trains on random tokens.
        precision: "fp32", "fp16" or "bf16".
        pkg: a label of the data, which the result contains.
        version: another label.
        knowledge_type: another label.
        log_dir: the directory of the report and the profile.
        token: token of the Hugging Face hub; default: HF_TOKEN. It is not written to any file.
        device: "auto" (CUDA if there is a GPU), "cuda" or "cpu".
        language: "en" or "zh", of log lines, the report and findings; None: the process' language.

    Returns:
        The trained model, and {"creation_analysis", "training_analysis" (see `analyze_model`), "memory_issues",
        "stages", "losses", "peak" (device → {"requested_bytes", "categories", ...}; empty if another session runs),
        "labels", "report_file"}.

    Raises:
        MemprofError: the configuration, the precision, the device or a batch cannot be used, or the model cannot be
            made.
    """
    settings = lora.read_settings(config)
    lora.parse_precision(precision)
    lora.choose_device(device)
    with in_language(language), memory_profiled_training(log_dir, device, language) as profiler:
        model = profiler.profile_stage("model_creation", lora.create_model, settings, precision, token, device)
        creation = analyze_model(model, tr("model creation"))
        if dataloader is None:
            dataloader = lora.synthetic_batches(settings, lora.vocabulary_size(model))
        training = profiler.profile_stage("preparation", lora.prepare_training, model, dataloader, settings)
        losses = profiler.profile_stage("training", lora.train, training, precision, lambda: profiler.note("step"))
        trained = analyze_model(model, tr("training"))
        lora.remove_opacus(training)
    issues = [*creation["findings"], *trained["findings"], *profiler.memory_issues()]
    devices = profiler.profile.devices if profiler.profile else {}
    return model, {
        "creation_analysis": creation,
        "training_analysis": trained,
        "memory_issues": [issue for index, issue in enumerate(issues) if issue not in issues[:index]],
        "stages": profiler.stages,
        "losses": losses,
        "peak": {name: to_builtins(device.peak) for name, device in devices.items()},
        "labels": {"pkg": pkg, "version": version, "knowledge_type": knowledge_type},
        "report_file": str(Path(log_dir) / "training_report.txt"),
    }


def debug_memory_with_different_configs(
    base_config: object,
    variations: Mapping[str, Mapping[str, Any]],
    precision: str = "fp32",
    log_dir: str | os.PathLike[str] = "logs/config_comparison",
    token: str | None = None,
    device: str = "auto",
    language: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Runs `debug_lora_training` for each variation of a configuration, on random tokens.

    Args:
        base_config: see `config` of `debug_lora_training`.
        variations: name → the settings of `opacus_memprof.toolkit.lora.Settings` that differ.
        precision: "fp32", "fp16" or "bf16".
        log_dir: the parent of each variation's directory, which has its name (or number).
        token: token of the Hugging Face hub; default: HF_TOKEN.
        device: "auto" (CUDA if there is a GPU), "cuda" or "cpu".
        language: see `debug_lora_training`.

    Returns:
        name → {"memory_mb", "total", "trainable", "param_efficiency" (of the model, see `analyze_model`),
        "peak_memory_mb" (of one training run; None if another session runs), "memory_issues", "config"}.

    Raises:
        MemprofError: there are no variations, or one that changes no used setting.
    """
    base = vars(lora.read_settings(base_config))
    if not isinstance(variations, Mapping) or not variations:
        raise MemprofError("there are no configurations to compare: pass a dict of changes by name")
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
        gc.collect()  # the previous model is part of cycles, and would count
        config = {**base, **variation}
        config["model"] = copy.deepcopy(config["model"])  # adapters are added to the given model
        result = debug_lora_training(
            config, precision=precision, log_dir=directory, token=token, device=device, language=language
        )[1]
        analysis = result["creation_analysis"]
        peaks = [peak["requested_bytes"] / MB for peak in result["peak"].values()]
        results[name] = {
            **{key: analysis[key] for key in ("memory_mb", "total", "trainable", "param_efficiency")},
            "peak_memory_mb": max(peaks, default=None),
            "memory_issues": result["memory_issues"],
            "config": dict(variation),
        }
    return results


def _find_trainable(objects: Iterable[object]) -> Iterator[nn.Module | Optimizer]:
    """Yields the models with parameters and the optimizers among the objects and their elements."""
    for container in objects:
        for each in _elements(container):
            if isinstance(each, Optimizer) or (isinstance(each, nn.Module) and any(True for _ in each.parameters())):
                yield each


def _elements(container: object) -> Iterable[object]:
    """Returns the elements of a list, tuple, mapping or dataclass; for any other object, the object."""
    if isinstance(container, (list, tuple)):
        return container
    if isinstance(container, Mapping):
        return container.values()
    is_instance = is_dataclass(container) and not isinstance(container, type)
    return vars(container).values() if is_instance else (container,)


def _summary(profile: Profile) -> str:
    from opacus_memprof.analysis.profile_view import view_profile
    from opacus_memprof.reports.text import print_profile

    text = io.StringIO()
    print_profile(view_profile(profile), Console(file=text, width=100, force_jupyter=False))
    return text.getvalue()
