# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof debug`: debugs the memory of LoRA training."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from opacus_memprof.cli.options import DeviceName, Token, VirtualGpuKind, VirtualGpuOptions, VirtualMemory, hide_token
from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.configuration import Dtype
from opacus_memprof.integrations.hub import use_cache_if_hub_unreachable
from opacus_memprof.language import tr
from opacus_memprof.profiles.files import write_text, writing

Level = Literal["model_only", "full", "custom", "comparison"]

RANKS = {
    "small_r": {"r": 8, "alpha": 16},
    "medium_r": {"r": 16, "alpha": 32},
    "large_r": {"r": 32, "alpha": 64},
}


@dataclass(frozen=True)
class _Request:
    """A model to debug, and the device."""

    model: str
    precision: str
    labels: dict[str, Any]
    log_dir: Path
    token: str | None
    device: str


def debug(
    level: Annotated[
        Level,
        typer.Option(
            "--level",
            "--debug-level",
            help="model_only: the model. full: a training. custom: its stages. comparison: three LoRA ranks.",
        ),
    ] = "full",
    model: Annotated[
        str, typer.Option(help="tiny (built in, random weights), a Hugging Face id, or a local path.")
    ] = "tiny",
    precision: Annotated[Dtype, typer.Option(help="Data type of the frozen weights and of autocast.")] = "fp32",
    pkg: Annotated[str | None, typer.Option(help="Label of the results: package of the data.")] = None,
    version: Annotated[str | None, typer.Option(help="Label of the results: version of the data.")] = None,
    knowledge_type: Annotated[str | None, typer.Option(help="Label of the results: kind of the data.")] = None,
    log_dir: Annotated[Path, typer.Option(metavar="DIR", help="Directory of the report, results and profile.")] = Path(
        "logs/memory_debug"
    ),
    token: Token = None,
    device: DeviceName = "auto",
    virtual_gpu: VirtualGpuKind = None,
    virtual_memory: VirtualMemory = None,
) -> None:
    """Debug the memory of LoRA training, on random tokens."""
    hide_token(sys.argv)
    if virtual_gpu is not None and device == "cpu":
        raise MemprofError("a virtual GPU is not a CPU: leave out --device cpu or --virtual-gpu")
    with writing(log_dir):  # fails before the training, not after it
        log_dir.mkdir(parents=True, exist_ok=True)
    # Without weights, because nobody would read their values.
    VirtualGpuOptions(virtual_gpu, virtual_memory, no_weights=virtual_gpu is not None).start()
    if model != "tiny":
        use_cache_if_hub_unreachable()
    labels = {"pkg": pkg, "version": version, "knowledge_type": knowledge_type}
    results = _LEVELS[level](_Request(model, precision, labels, log_dir, token, device))
    text = json.dumps(results, ensure_ascii=False, indent=2, default=msgspec.to_builtins)
    path = write_text(log_dir / "results.json", f"{text}\n")
    print(tr("results: {path}", path=path))


def _model_only(request: _Request) -> dict[str, Any]:
    from opacus_memprof.toolkit import lora
    from opacus_memprof.toolkit.model import analyze_model
    from opacus_memprof.toolkit.training import memory_profiled_training

    with memory_profiled_training(request.log_dir, request.device) as profiler:
        created = profiler.profile_stage(
            "model_creation",
            lora.create_model,
            lora.Settings(model=request.model),
            request.precision,
            request.token,
            request.device,
        )
    analysis = analyze_model(created, request.model)
    return {"creation_analysis": analysis, "stages": profiler.stages, "labels": request.labels}


def _full(request: _Request) -> dict[str, Any]:
    from opacus_memprof.toolkit.training import debug_lora_training

    _, results = debug_lora_training(
        {"model": request.model},
        None,
        request.precision,
        **request.labels,
        log_dir=request.log_dir,
        token=request.token,
        device=request.device,
    )
    print(Path(results["report_file"]).read_text(encoding="utf-8"))
    return results


def _custom(request: _Request) -> dict[str, Any]:
    from opacus_memprof.toolkit import lora
    from opacus_memprof.toolkit.training import memory_profiled_training

    chosen = lora.Settings(model=request.model)
    with memory_profiled_training(request.log_dir, request.device) as profiler:
        created = profiler.profile_stage(
            "model_creation", lora.create_model, chosen, request.precision, request.token, request.device
        )
        vocabulary = lora.vocabulary_size(created)
        loader = profiler.profile_stage("data_loading", lora.synthetic_batches, chosen, vocabulary)
        training = profiler.profile_stage("preparation", lora.prepare_training, created, loader, chosen)
        batches = list(training.batches)
        training.batches = batches[:1]
        profiler.profile_stage("first_step", lora.train, training, request.precision)
        training.batches = batches[1:]
        profiler.profile_stage("further_steps", lora.train, training, request.precision)
    print(profiler.generate_training_report())
    return {"stages": profiler.stages, "memory_issues": profiler.memory_issues(), "labels": request.labels}


def _comparison(request: _Request) -> dict[str, Any]:
    from opacus_memprof.toolkit.training import debug_memory_with_different_configs

    found = debug_memory_with_different_configs(
        {"model": request.model}, RANKS, request.precision, request.log_dir, request.token, request.device
    )
    for name, result in found.items():
        print(
            tr(
                "{name}: model {size:.2f} MB, {trainable:,} trainable parameters, peak {peak}",
                name=name,
                size=result["memory_mb"],
                trainable=result["trainable"],
                peak=tr("unknown") if result["peak_memory_mb"] is None else f"{result['peak_memory_mb']:.2f} MB",
            )
        )
    best = min(found, key=lambda name: float(found[name]["memory_mb"]))
    print(tr("smallest: {name}", name=best))
    return {"configurations": found, "smallest": best, "labels": request.labels}


_LEVELS: dict[Level, Callable[[_Request], dict[str, Any]]] = {
    "model_only": _model_only,
    "full": _full,
    "custom": _custom,
    "comparison": _comparison,
}
