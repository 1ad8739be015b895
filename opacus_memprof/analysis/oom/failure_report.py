# SPDX-License-Identifier: Apache-2.0
"""Builds the content of oom_report.json, whose fields docs/oom.md documents."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from msgspec import UNSET, UnsetType

from opacus_memprof.analysis.events import Names
from opacus_memprof.analysis.oom import failure as failures
from opacus_memprof.analysis.oom.advice import advise
from opacus_memprof.analysis.oom.advice.changes import bytes_per_sample, largest_that_fits
from opacus_memprof.analysis.oom.estimate import estimate_step
from opacus_memprof.analysis.oom.failure import Failure, device_memory_at, find_leftovers, read_history, sum_by
from opacus_memprof.analysis.oom.flash import FlashClip
from opacus_memprof.analysis.oom.layers import Layer
from opacus_memprof.analysis.oom.predict import Case
from opacus_memprof.analysis.oom.step import Step
from opacus_memprof.profiles.layer_shapes import TrainingShapes
from opacus_memprof.profiles.oom_report import (
    FittingBatch,
    HeldBlocks,
    HeldSince,
    Holders,
    LayerCost,
    LeftBehind,
    LossBytes,
    NeededPeak,
    OomReport,
    Request,
)
from opacus_memprof.profiles.profile import Groups, NameLists, Virtual

_TOP = 20
_LARGE_LOSS, _NEAR_PEAK = 0.4, 0.97  # of the needed bytes


def build_report(
    failed: Sequence[Mapping[str, Any]],
    shapes: TrainingShapes,
    captures: Mapping[int, int] | None = None,
    replayed: Mapping[str, Any] | None = None,
    names: NameLists | None = None,
    virtual: Virtual = UNSET,
) -> OomReport:
    """Builds the report of the last failure.

    Args:
        failed: native.failures(), at least one.
        shapes: what is being trained.
        captures: of Opacus, by module id, where several forwards in a row began with some that await a backward.
        replayed: core.replay() of the run's events so far, if there are any.
        names: of its ids.
        virtual: of a run on virtual GPUs, what they were and could not know.
    """
    failure = failures.read_failure(failed[-1])
    shapes = shapes.at_instant()
    names = names or NameLists()
    names_by_id = None if replayed is None else Names(names, replayed)
    history = read_history(_device(replayed, failure.device), names_by_id, failure.step)
    waiting = {
        names.modules[id]: count for id, count in (captures or {}).items() if count > 1 and id < len(names.modules)
    }
    evaluation = failures.find_evaluation(failure, shapes)
    is_evaluation = evaluation is not None
    forward = 0 if evaluation is None or evaluation[1] else shapes.peak_without_graph()
    graphs = 0 if is_evaluation else shapes.waiting or 0
    samples = None if is_evaluation else shapes.batch_size_in(failure.step)
    left = find_leftovers(failure, waiting, shapes.stray_samples, samples or 0, shapes.weights, graphs)
    own = None if is_evaluation else estimate_step(failure, shapes, history, left)
    case = Case(failure, shapes, history, device_memory_at(failure), own, samples, left, forward=forward)
    # Of this batch; BatchMemoryManager's differ little, and all others are at most as large as the largest.
    needed = case.peak(case.most_samples if shapes.program.splits_batches else case.samples)
    fitting = largest_that_fits(case, case.peak)
    return OomReport(
        device=failure.device,
        request=_request(failure),
        live_bytes=failure.live_bytes,
        needed=NeededPeak(
            bytes=needed.bytes,
            phase=needed.phase,
            module=needed.module,
            parts={name: size for name, size in needed.parts.items() if size},
        ),
        mode=shapes.mode,
        holders=_holders(failure, dict(zip(names.ops, names.lines, strict=False))),
        left_behind=LeftBehind(
            bytes=left.bytes,
            categories=left.by_category,
            modules=left.by_module,
            steps=left.steps,
            captures=left.are_captures,
        ),
        room=case.memory.for_report(),
        batch=FittingBatch(
            samples=case.samples,
            bytes_per_sample=None if case.samples is None else bytes_per_sample(case, case.peak),
            largest_that_fits=None if fitting is None else fitting[0],
            predicted_peak_bytes=None if fitting is None else fitting[1].bytes,
            unit="node" if shapes.has_nodes else "sample",
        ),
        layers=[] if own is None else [_layer(layer, own.samples, own.on_gpu) for layer in _costliest(own)],
        suggestions=[each.for_report() for each in advise(case)],
        earlier_failures=[_request(failures.read_failure(earlier)) for earlier in failed[:-1]],
        loss=UNSET if own is None else _loss(own, needed.bytes),
        virtual=virtual,
    )


def _loss(step: Step, needed: int) -> LossBytes | UnsetType:
    """Returns what the loss takes, if it makes the peak and takes a large part of it, as of a large vocabulary."""
    instant = next(each for each in step.instants(step.samples) if each.is_loss)
    size = step.output + step.loss + instant.parts["backward_temporaries"]
    if size < _LARGE_LOSS * needed or instant.bytes < _NEAR_PEAK * needed:
        return UNSET
    return LossBytes(module=step.layers[-1].name, bytes=size, output_bytes=step.logits)


def _costliest(step: Step) -> list[Layer]:
    """Returns the layers for which privacy needs the most memory, in any mode."""
    n = step.samples
    return sorted(step.layers, key=lambda layer: -max(layer.per_sample_gradients(n), layer.ghost_norms(n)))[:_TOP]


def _layer(layer: Layer, n: int, gpu: bool) -> LayerCost:
    return LayerCost(
        module=layer.name,
        kind=layer.module.kind,
        samples=n,
        tokens=layer.forward.tokens,
        activations_bytes=layer.activations,
        per_sample_gradients_bytes=layer.per_sample_gradients(n),
        ghost_bytes=layer.ghost_norms(n),
        flash_clip_bytes=FlashClip(layer, in_registers=gpu).kept_bytes(n),
    )


def _device(replayed: Mapping[str, Any] | None, name: str) -> Mapping[str, Any] | None:
    wanted = 0 if name == "cpu" else 1 + int(name.partition(":")[2])
    devices = [] if replayed is None else replayed["devices"]
    return next((device for device in devices if device["id"] == wanted), None)


def _request(failure: Failure) -> Request:
    return Request(
        bytes=failure.requested,
        category=failure.category,
        module=failure.module,
        op=failure.op,
        phase=failure.phase,
        step=failure.step,
        logical_step=failure.logical_step,
        unix_ns=failure.unix_ns,
    )


def _holders(failure: Failure, lines: Mapping[str, str]) -> Holders:
    unattributed = [group for group in failure.block_groups if group.category == "unattributed" and lines.get(group.op)]
    modules: Groups = {}
    for (module, category), size in failure.sum_by(lambda group: (group.module, group.category)).items():
        modules.setdefault(module, {})[category] = size
    return Holders(
        categories=failure.sum_by(lambda group: group.category),
        modules=dict(sorted(modules.items(), key=lambda item: -sum(item[1].values()))),
        steps=[
            HeldSince(step=step, age=failure.step - step, bytes=size)
            for step, size in failure.sum_by(lambda group: group.step).items()
        ],
        largest=[HeldBlocks(**asdict(group), age=failure.step - group.step) for group in failure.block_groups[:_TOP]],
        unattributed=sum_by(unattributed, lambda group: lines[group.op]),
    )
