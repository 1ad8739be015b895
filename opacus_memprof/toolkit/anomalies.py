# SPDX-License-Identifier: Apache-2.0
"""Finds anomalies in the memory of a run and in a model, each with its evidence and a remedy.

Findings are those of profiles, with a severity; `module` is a parameter's name. The constants here are the thresholds.
Sizes are in MB of 2**20 bytes.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Literal

import torch
from torch import nn

from opacus_memprof.language import tr
from opacus_memprof.profiles.profile import Finding
from opacus_memprof.toolkit.output import LOGGER, MB
from opacus_memprof.toolkit.readings import RESIDENT, MemorySnapshot

MONITOR = "monitor"  # the name of readings that are taken at an interval, not at a certain point of a step

# A leak: the first readings of a name are ignored (when optimizer states and workspaces are created). The other
# readings are cut into eight equal windows, and from each to the next both the lowest and the highest reading rise.
# Readings that only vary do this by chance less than once in ten million. A single allocation that stays is not a leak,
# however large: it affects at most two of the rises between windows, so the other five alone must reach the threshold.
# (Resident memory grows while an allocation is being filled. Its windows are long enough for that.)
WARM_UP_READINGS = 2
LEAK_WINDOWS = 8
LEAK_READINGS = 16  # beyond warm-up; for readings at an interval, LEAK_MONITOR_READINGS
LEAK_MONITOR_READINGS = 40
LEAK_ONCE = 2  # rises that one allocation can make
LEAK_WINDOW_SECONDS = 2.0  # at least, of resident memory that is read at an interval
LEAK_MB = 1.0  # at least, without the largest LEAK_ONCE rises
LEAK_RESIDENT_MB = 32.0  # where only the process' resident memory is known, which grows slowly without a leak

# Sudden growth: a reading that exceeds all earlier ones with the same name by this much, after so many. Named points of
# a program may have one reading each; there the program says how much is too much.
GROWTH_READINGS = 10
GROWTH_RATIO = 1.5
GROWTH_MB = 200.0

OVERUSE_RATIO = 0.9  # of the device's memory

# Fragmentation: bytes that the allocator had to reserve at its peak beyond the most that was ever in use at once.
FRAGMENTATION_RATIO = 0.3  # of the reserved bytes
FRAGMENTATION_MB = 256.0

LARGE_PARAMETER_RATIO = 0.1  # of all parameters' bytes
LARGE_PARAMETER_MB = 100.0

EXPLODING_GRADIENT = 1e4  # root mean square of a parameter's gradient; fp16 ends at 6.5e4


def find_in_history(history: Sequence[MemorySnapshot], growth_mb: float | None = None) -> list[Finding]:
    """Finds leaks and sudden growth among snapshots of the same name, and the anomalies of the newest snapshot.

    Args:
        history: snapshots from `memory_snapshot`, oldest first.
        growth_mb: the maximum growth from one named snapshot to another, in MB. None: only a reading that exceeds many
            earlier ones is sudden growth.
    """
    findings = []
    series: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    for snapshot in history:
        for reading in snapshot["devices"]:
            key = (reading["device"], reading["source"], snapshot["name"])
            series.setdefault(key, []).append((reading["allocated_mb"], snapshot["timestamp"]))
    leaks: list[Finding] = []  # a leak shows at every point of a step
    for (device, source, name), readings in series.items():
        if growth_mb is None or name == MONITOR:
            findings += _sudden_growth(device, name, [size for size, _ in readings])
        leaks += _leak(device, source, name, readings)
    if growth_mb is not None:
        findings += _growth_between([snapshot for snapshot in history if snapshot["name"] != MONITOR], growth_mb)
    return [*largest(leaks), *findings, *(find_in_snapshot(history[-1]) if history else [])]


def find_in_snapshot(snapshot: MemorySnapshot, threshold_mb: float | None = None) -> list[Finding]:
    """Finds overuse, fragmentation, and devices where more than `threshold_mb` is in use."""
    findings = []
    for reading in snapshot["devices"]:
        device, used, reserved = reading["device"], reading["allocated_mb"], reading["reserved_mb"]
        if threshold_mb is not None and used > threshold_mb:
            evidence = tr(
                "{device} memory use exceeds the threshold: {used:.1f}MB > {threshold:.1f}MB",
                device=device_label(device),
                used=used,
                threshold=threshold_mb,
            )
            remedy = tr("see which category holds it (opacus_memprof.profile), or raise the threshold")
            findings.append(_finding("over_threshold", used - threshold_mb, evidence, remedy, device=device))
        if reading["total_mb"] and used >= OVERUSE_RATIO * reading["total_mb"]:
            evidence = tr(
                "{device} is {share:.1f}% full: {used:.1f}MB in use",
                device=device_label(device),
                share=100 * used / reading["total_mb"],
                used=used,
            )
            remedy = tr("take a smaller physical batch (BatchMemoryManager), or grad_sample_mode ghost")
            findings.append(_finding("overuse", used, evidence, remedy, device=device))
        never_used = reading["max_reserved_mb"] - reading["max_allocated_mb"]
        if never_used >= max(FRAGMENTATION_MB, FRAGMENTATION_RATIO * reading["max_reserved_mb"]):
            evidence = tr(
                "{device} reserved up to {reserved:.1f}MB while at most {used:.1f}MB were in use at once; now "
                "{cached:.1f}MB are cached",
                device=device_label(device),
                reserved=reading["max_reserved_mb"],
                used=reading["max_allocated_mb"],
                cached=reserved - used,
            )
            remedy = tr("set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
            findings.append(_finding("fragmentation", never_used, evidence, remedy, device=device))
    return findings


def find_in_model(model: nn.Module) -> list[Finding]:
    """Finds parameters that are very large or not finite, and gradients that are not finite, very large or unused.

    Allocates a few numbers for each parameter, but no copy of it.
    """
    findings = []
    parameters = dict(model.named_parameters())
    total = sum(parameter.nbytes for parameter in parameters.values())
    for name, parameter in parameters.items():
        size = parameter.nbytes / MB
        if size >= max(LARGE_PARAMETER_MB, LARGE_PARAMETER_RATIO * total / MB):
            evidence = tr("large parameter: {name} ({size:.2f} MB)", name=name, size=size)
            remedy = tr(
                "it is {share:.0f}% of the model: freeze it or train a LoRA adapter, because per-sample gradients "
                "would take its size for every sample",
                share=100 * parameter.nbytes / total,
            )
            findings.append(_finding("large_parameter", size, evidence, remedy, module=name))
        if wrong := _not_finite(parameter):
            evidence = tr("parameter contains {wrong}: {name}", wrong=wrong, name=name)
            remedy = tr("go back to the last checkpoint that was finite, and lower the learning rate")
            findings.append(_finding("nan_inf_parameter", size, evidence, remedy, module=name, error=True))
        if parameter.grad is not None:
            findings += _gradient(name, parameter, parameter.grad)
    return findings


def log(findings: Sequence[Finding]) -> None:
    """Logs each finding's evidence, as a warning or an error."""
    for finding in findings:
        LOGGER.log(logging.ERROR if finding.severity == "error" else logging.WARNING, finding.evidence)


def largest(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the finding with the most bytes of each device."""
    return list({finding.device: finding for finding in sorted(findings, key=lambda finding: finding.bytes)}.values())


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Returns a tensor's bytes; for a sparse tensor, the bytes of its indices and values."""
    if not tensor.is_sparse:
        return tensor.nbytes
    return tensor._indices().nbytes + tensor._values().nbytes


def device_label(device: str) -> str:
    """Returns the label of a device: "GPU 0" for "cuda:0"."""
    return device.replace("cuda:", "GPU ") if device.startswith("cuda:") else device.upper()


def _finding(
    kind: str, size_mb: float, evidence: str, remedy: str, *, module: str = "", device: str = "", error: bool = False
) -> Finding:
    severity: Literal["warning", "error"] = "error" if error else "warning"
    return Finding(kind, module, round(size_mb * MB), evidence, remedy, device=device, severity=severity)


def _leak(device: str, source: str, name: str, readings: Sequence[tuple[float, str]]) -> list[Finding]:
    min_readings = LEAK_MONITOR_READINGS if name == MONITOR else LEAK_READINGS
    length = (len(readings) - WARM_UP_READINGS) // LEAK_WINDOWS
    if length * LEAK_WINDOWS < min_readings:
        return []
    steady = readings[len(readings) - length * LEAK_WINDOWS :]
    if name == MONITOR and source == RESIDENT and _duration_s(steady) < LEAK_WINDOWS * LEAK_WINDOW_SECONDS:
        return []
    windows = [[size for size, _ in steady[start : start + length]] for start in range(0, len(steady), length)]
    if any(min(before) >= min(after) or max(before) >= max(after) for before, after in pairwise(windows)):
        return []
    rises = sorted(min(after) - min(before) for before, after in pairwise(windows))
    if sum(rises[:-LEAK_ONCE]) < (LEAK_RESIDENT_MB if source == RESIDENT else LEAK_MB):
        return []
    growth = min(windows[-1]) - min(windows[0])
    per_reading = growth / (len(steady) - length)
    evidence = tr(
        '{device} memory keeps growing: the last {count} readings of "{name}" went from {first:.1f}MB to {last:.1f}MB, '
        "{each:+.2f}MB each",
        device=device_label(device),
        count=len(steady),
        name=name,
        first=min(windows[0]),
        last=min(windows[-1]),
        each=per_reading,
    )
    remedy = tr("look for losses or outputs that are kept with their graph (use .item() or .detach()), and for lists")
    return [_finding("leak", growth, evidence, remedy, device=device)]


def _duration_s(readings: Sequence[tuple[float, str]]) -> float:
    first, last = (datetime.fromisoformat(timestamp) for _, timestamp in (readings[0], readings[-1]))
    return (last - first).total_seconds()


def _sudden_growth(device: str, name: str, sizes: Sequence[float]) -> list[Finding]:
    highest = 0.0
    for index, size in enumerate(sizes):
        if index >= GROWTH_READINGS and highest > 0 and size > highest * GROWTH_RATIO and size - highest > GROWTH_MB:
            evidence = tr(
                '{device} memory grew suddenly: reading {number} of "{name}" is {size:.1f}MB, and none before exceeded '
                "{highest:.1f}MB",
                device=device_label(device),
                number=index + 1,
                name=name,
                size=size,
                highest=highest,
            )
            remedy = tr("compare this step's batch (size, sequence length) with the others'")
            return [_finding("sudden_growth", size - highest, evidence, remedy, device=device)]
        highest = max(highest, size)
    return []


def _growth_between(history: Sequence[MemorySnapshot], growth_mb: float) -> list[Finding]:
    """Finds growth by more than `growth_mb` to a snapshot.

    A name that occurred before is compared with the lowest snapshot of that name, at the same point of a step. A new
    name is compared with the lowest snapshot of all. After a finding, later snapshots are compared with its snapshot.
    Of several findings of one name, the largest is returned.
    """
    found: dict[tuple[str, str], Finding] = {}
    lowest: dict[tuple[str, str, str | None], tuple[str, float]] = {}
    for snapshot in history:
        name = snapshot["name"]
        for reading in snapshot["devices"]:
            device, source, size = reading["device"], reading["source"], reading["allocated_mb"]
            reference = name if (device, source, name) in lowest else None
            before, lowest_size = lowest.get((device, source, reference), (name, size))
            grew = size - lowest_size > growth_mb
            if grew or size <= lowest_size:
                lowest[device, source, reference] = name, size
            lowest.setdefault((device, source, name), (name, size))
            if not grew:
                continue
            evidence = tr(
                '{device} memory grew by {growth:.1f}MB from "{before}" to "{name}", to {size:.1f}MB: more than the '
                "threshold of {threshold:.1f}MB",
                device=device_label(device),
                growth=size - lowest_size,
                before=before,
                name=name,
                size=size,
                threshold=growth_mb,
            )
            remedy = tr("see which category grew (opacus_memprof.profile, compare_checkpoints), or raise the threshold")
            growth = _finding("sudden_growth", size - lowest_size, evidence, remedy, device=device)
            found[device, name] = max(found.get((device, name), growth), growth, key=lambda finding: finding.bytes)
    return list(found.values())


def _gradient(name: str, parameter: nn.Parameter, gradient: torch.Tensor) -> list[Finding]:
    size = tensor_bytes(gradient) / MB
    if wrong := _not_finite(gradient):
        evidence = tr("gradient contains {wrong}: {name}", wrong=wrong, name=name)
        remedy = tr("check the batch and the loss for NaN, lower the learning rate, or scale the loss under fp16")
        return [_finding("gradient_anomaly", size, evidence, remedy, module=name, error=True)]
    if not parameter.requires_grad:
        evidence = tr("frozen parameter with a gradient: {name}", name=name)
        remedy = tr("set its grad to None: it takes memory, and the optimizer has no use for it")
        return [_finding("gradient_anomaly", size, evidence, remedy, module=name)]
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    norm = float(torch.linalg.vector_norm(values.detach(), dtype=torch.promote_types(values.dtype, torch.float32)))
    mean = norm / math.sqrt(gradient.numel()) if gradient.numel() else 0.0
    if mean > EXPLODING_GRADIENT:
        evidence = tr(
            "gradient of norm {norm:.3g}, entries of {mean:.3g} in the root mean square: {name}",
            norm=norm,
            mean=mean,
            name=name,
        )
        remedy = tr("clip gradients, or lower the learning rate")
        return [_finding("gradient_anomaly", size, evidence, remedy, module=name)]
    return []


def _not_finite(tensor: torch.Tensor) -> str:
    """Returns "NaN", "Inf" or "". Uses the extremes, because a mask would have the tensor's size."""
    values = tensor.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    if values.is_meta or values.numel() == 0 or not (values.is_floating_point() or values.is_complex()):
        return ""
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.element_size() == 1:  # float8 has no extremes
        values = values.float()
    extremes = [float(extreme) for extreme in torch.aminmax(values)]
    if any(map(math.isnan, extremes)):
        return "NaN"
    return "Inf" if any(map(math.isinf, extremes)) else ""
