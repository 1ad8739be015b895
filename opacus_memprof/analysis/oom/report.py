# SPDX-License-Identifier: Apache-2.0
"""oom_report.json. docs/oom.md documents its fields."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from opacus_memprof.analysis.names import Names
from opacus_memprof.analysis.oom import failure as failures
from opacus_memprof.analysis.oom import history as histories
from opacus_memprof.analysis.oom.advice import advise
from opacus_memprof.analysis.oom.advice.batch import largest_that_fits, slope_of
from opacus_memprof.analysis.oom.estimate import step_of
from opacus_memprof.analysis.oom.failure import Failure
from opacus_memprof.analysis.oom.flash import FlashClip
from opacus_memprof.analysis.oom.layers import Layer
from opacus_memprof.analysis.oom.left import left_behind
from opacus_memprof.analysis.oom.predict import Case
from opacus_memprof.analysis.oom.room import room_of
from opacus_memprof.analysis.oom.step import Step
from opacus_memprof.workload import Workload

FORMAT = 1
_TOP = 20


def build_report(
    failed: Sequence[Mapping[str, Any]],
    workload: Workload,
    captures: Mapping[int, int] | None = None,
    replayed: Mapping[str, Any] | None = None,
    names: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """The report of the last of `failed`.

    Args:
        failed: _native.failures(), at least one.
        workload: what is being trained.
        captures: of Opacus, by module id, where several forwards in a row began with some that await a backward.
        replayed: core.replay() of the run's events so far, where there are any; `names`: _native.names().
    """
    failure = failures.read(failed[-1])
    known = None if replayed is None else Names({"names": names or {}}, replayed)
    history = histories.read(_device(replayed, failure.device), known, failure.step)
    modules = (names or {}).get("modules", ())
    waiting = {modules[id]: count for id, count in (captures or {}).items() if count > 1 and id < len(modules)}
    left = left_behind(failure, waiting)
    own = step_of(failure, workload, history, left.by_category.get("activation_hooks", 0) if waiting else 0)
    case = Case(failure, workload, history, room_of(failure), own, workload.batch_of(failure.step), left)
    needed = case.peak()
    fitting = largest_that_fits(case, case.peak)
    return {
        "format": FORMAT,
        "device": failure.device,
        "request": _request(failure),
        "live_bytes": failure.live,
        "needed": {
            "bytes": needed.bytes,
            "phase": needed.phase,
            "module": needed.module,
            "parts": {name: size for name, size in needed.parts.items() if size},
        },
        "mode": workload.mode,
        "holders": _holders(failure),
        "left_behind": {
            "bytes": left.bytes,
            "categories": left.by_category,
            "modules": left.by_module,
            "steps": left.steps,
            "captures": left.captures,
        },
        "room": case.room.as_dict(),
        "batch": {
            "samples": case.samples,
            "bytes_per_sample": None if case.samples is None else slope_of(case, case.peak),
            "largest_that_fits": None if fitting is None else fitting[0],
            "predicted_peak_bytes": None if fitting is None else fitting[1].bytes,
        },
        "layers": [] if own is None else [_layer(layer, own.samples, own.gpu) for layer in _costliest(own)],
        "suggestions": [one.as_dict() for one in advise(case)],
        "earlier_failures": [_request(failures.read(one)) for one in failed[:-1]],
    }


def _costliest(step: Step) -> list[Layer]:
    """The layers for which privacy takes the most, in any mode."""
    n = step.samples
    return sorted(step.layers, key=lambda one: -max(one.gradients(n), one.ghost(n)))[:_TOP]


def _layer(layer: Layer, n: int, gpu: bool) -> dict[str, Any]:
    return {
        "module": layer.name,
        "kind": layer.module.kind,
        "samples": n,
        "tokens": layer.forward.tokens,
        "activations_bytes": layer.activations,
        "per_sample_gradients_bytes": layer.gradients(n),
        "ghost_bytes": layer.ghost(n),
        "flash_clip_bytes": FlashClip(layer, fused=gpu).kept(n),
    }


def _device(replayed: Mapping[str, Any] | None, name: str) -> Mapping[str, Any] | None:
    wanted = 0 if name == "cpu" else 1 + int(name.partition(":")[2])
    devices = [] if replayed is None else replayed["devices"]
    return next((device for device in devices if device["id"] == wanted), None)


def _request(failure: Failure) -> dict[str, Any]:
    keys = ("category", "module", "op", "phase", "step", "logical_step", "unix_ns")
    return {"bytes": failure.requested, **{key: getattr(failure, key) for key in keys}}


def _holders(failure: Failure) -> dict[str, Any]:
    modules: dict[str, dict[str, int]] = {}
    for (module, category), size in failure.totals(lambda one: (one.module, one.category)).items():
        modules.setdefault(module, {})[category] = size
    return {
        "categories": failure.totals(lambda one: one.category),
        "modules": dict(sorted(modules.items(), key=lambda item: -sum(item[1].values()))),
        "steps": [
            {"step": step, "age": failure.step - step, "bytes": size}
            for step, size in failure.totals(lambda one: one.step).items()
        ],
        "largest": [{**asdict(one), "age": failure.step - one.step} for one in failure.holdings[:_TOP]],
    }
