# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the memory of a run or with a model, each with its evidence and a remedy.

A finding is {"kind", "severity" ("warning" or "error"), "module" (a parameter's name or ""), "device", "bytes",
"evidence", "remedy"}. The thresholds are the constants here; sizes in MB of 2**20 bytes.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from opacus_memprof.toolkit.output import MB, say
from opacus_memprof.toolkit.readings import RESIDENT

MONITOR = "monitor"  # the name of readings that are taken at an interval, at no particular point of a step

# A leak: leaving out the first readings of a name (optimizer states and workspaces come to be in them), the rest is cut
# into eight equal windows, and from each to the next both the lowest and the highest reading rise. Readings that only
# vary do that by chance less than once in ten million; readings that grew once, as caches do, do not.
WARM_UP_READINGS = 2
LEAK_WINDOWS = 8
LEAK_READINGS = 16  # beyond warm-up; of readings at an interval, LEAK_MONITOR_READINGS
LEAK_MONITOR_READINGS = 40
LEAK_MB = 1.0  # at least, from the first window to the last
LEAK_RESIDENT_MB = 32.0  # where only the process' resident memory is known, which creeps without a leak

# Sudden growth: a reading that exceeds all before it under the same name by this much, after so many.
GROWTH_READINGS = 10
GROWTH_RATIO = 1.5
GROWTH_MB = 200.0

OVERUSE_RATIO = 0.9  # of the device's memory

# Fragmentation: what the allocator had to reserve at its peak beyond what was ever in use at once.
FRAGMENTATION_RATIO = 0.3  # of what is reserved
FRAGMENTATION_MB = 256.0

LARGE_PARAMETER_RATIO = 0.1  # of all parameters' bytes
LARGE_PARAMETER_MB = 100.0

EXPLODING_GRADIENT = 1e4  # root mean square of a parameter's gradient; fp16 ends at 6.5e4


def in_history(history: Sequence[Mapping[str, Any]], growth_mb: float = GROWTH_MB) -> list[dict[str, Any]]:
    """Leaks and sudden growth among snapshots of the same name, and what the newest snapshot shows by itself.

    Args:
        history: snapshots as `memory_snapshot` returns them, oldest first.
        growth_mb: what sudden growth must exceed, in MB.
    """
    findings = []
    series: dict[tuple[str, str, str], list[float]] = {}
    for snapshot in history:
        for reading in snapshot["devices"]:
            key = (reading["device"], reading["source"], snapshot["name"])
            series.setdefault(key, []).append(reading["allocated_mb"])
    largest_leak: dict[str, dict[str, Any]] = {}  # one leak shows at every point of the step
    for (device, source, name), sizes in series.items():
        findings += _sudden_growth(device, name, sizes, growth_mb)
        leak = _leak(device, source, name, sizes)
        if leak is not None and leak["bytes"] > largest_leak.get(device, {"bytes": 0})["bytes"]:
            largest_leak[device] = leak
    return [*largest_leak.values(), *findings, *(in_snapshot(history[-1]) if history else [])]


def in_snapshot(snapshot: Mapping[str, Any], threshold_mb: float | None = None) -> list[dict[str, Any]]:
    """Overuse and fragmentation, and devices where more than `threshold_mb` is in use."""
    findings = []
    for reading in snapshot["devices"]:
        device, used, reserved = reading["device"], reading["allocated_mb"], reading["reserved_mb"]
        if threshold_mb is not None and used > threshold_mb:
            evidence = f"{label(device)} memory use exceeds the threshold: {used:.1f}MB > {threshold_mb:.1f}MB"
            remedy = "see which category holds it (opacus_memprof.profile), or raise the threshold"
            findings.append(_finding("over_threshold", used - threshold_mb, evidence, remedy, device=device))
        if reading["total_mb"] and used >= OVERUSE_RATIO * reading["total_mb"]:
            evidence = f"{label(device)} is {100 * used / reading['total_mb']:.1f}% full: {used:.1f}MB in use"
            remedy = "take a smaller physical batch (BatchMemoryManager), or grad_sample_mode ghost"
            findings.append(_finding("overuse", used, evidence, remedy, device=device))
        never_used = reading["max_reserved_mb"] - reading["max_allocated_mb"]
        if never_used >= max(FRAGMENTATION_MB, FRAGMENTATION_RATIO * reading["max_reserved_mb"]):
            evidence = (
                f"{label(device)} reserved up to {reading['max_reserved_mb']:.1f}MB while at most "
                f"{reading['max_allocated_mb']:.1f}MB were in use at once; now {reserved - used:.1f}MB are cached"
            )
            remedy = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            findings.append(_finding("fragmentation", never_used, evidence, remedy, device=device))
    return findings


def in_model(model: nn.Module) -> list[dict[str, Any]]:
    """Parameters that are very large or not finite, and gradients that are not finite, very large or for nothing.

    Allocates a few numbers for each parameter, no copy of it.
    """
    findings = []
    parameters = dict(model.named_parameters())
    total = sum(parameter.nbytes for parameter in parameters.values())
    for name, parameter in parameters.items():
        size = parameter.nbytes / MB
        if size >= max(LARGE_PARAMETER_MB, LARGE_PARAMETER_RATIO * total / MB):
            evidence = f"large parameter: {name} ({size:.2f} MB, {100 * parameter.nbytes / total:.0f}% of the model)"
            remedy = "freeze it or train a LoRA adapter: per-sample gradients would take its size for every sample"
            findings.append(_finding("large_parameter", size, evidence, remedy, module=name))
        if wrong := _not_finite(parameter):
            remedy = "go back to the last checkpoint that was finite, and lower the learning rate"
            findings.append(
                _finding("nan_inf_parameter", size, f"parameter {wrong}: {name}", remedy, module=name, severity="error")
            )
        if parameter.grad is not None:
            findings += _gradient(name, parameter, parameter.grad)
    return findings


def log(findings: Sequence[Mapping[str, Any]]) -> None:
    """Says each finding's evidence, as a warning or an error."""
    for finding in findings:
        say(finding["evidence"], logging.ERROR if finding["severity"] == "error" else logging.WARNING)


def text(findings: Sequence[Mapping[str, Any]]) -> str:
    """The findings for a report."""
    if not findings:
        return "no anomalies\n"
    return "".join(f"{found['kind']}: {found['evidence']}\n  remedy: {found['remedy']}\n" for found in findings)


def bytes_of(tensor: torch.Tensor) -> int:
    """A tensor's bytes; of a sparse one, those of its indices and values."""
    if not tensor.is_sparse:
        return tensor.nbytes
    return tensor._indices().nbytes + tensor._values().nbytes


def label(device: str) -> str:
    """ "GPU 0" for "cuda:0"."""
    return device.replace("cuda:", "GPU ") if device.startswith("cuda:") else device.upper()


def _finding(
    kind: str,
    size_mb: float,
    evidence: str,
    remedy: str,
    *,
    module: str = "",
    device: str = "",
    severity: str = "warning",
) -> dict[str, Any]:
    return {
        "kind": kind,
        "severity": severity,
        "module": module,
        "device": device,
        "bytes": round(size_mb * MB),
        "evidence": evidence,
        "remedy": remedy,
    }


def _leak(device: str, source: str, name: str, sizes: Sequence[float]) -> dict[str, Any] | None:
    least = LEAK_MONITOR_READINGS if name == MONITOR else LEAK_READINGS
    length = (len(sizes) - WARM_UP_READINGS) // LEAK_WINDOWS
    if length * LEAK_WINDOWS < least:
        return None
    steady = sizes[len(sizes) - length * LEAK_WINDOWS :]
    windows = [steady[start : start + length] for start in range(0, len(steady), length)]
    grew = min(windows[-1]) - min(windows[0])
    if grew < (LEAK_RESIDENT_MB if source == RESIDENT else LEAK_MB):
        return None
    if any(min(before) >= min(after) or max(before) >= max(after) for before, after in pairwise(windows)):
        return None
    each = grew / (len(steady) - length)
    evidence = (
        f'{label(device)} memory keeps growing: the last {len(steady)} readings of "{name}" went from '
        f"{min(windows[0]):.1f}MB to {min(windows[-1]):.1f}MB, {each:+.2f}MB each"
    )
    remedy = "look for losses or outputs that are kept with their graph (use .item() or .detach()), and for lists"
    return _finding("leak", grew, evidence, remedy, device=device)


def _sudden_growth(device: str, name: str, sizes: Sequence[float], growth_mb: float) -> list[dict[str, Any]]:
    highest = 0.0
    for index, size in enumerate(sizes):
        if index >= GROWTH_READINGS and highest > 0 and size > highest * GROWTH_RATIO and size - highest > growth_mb:
            evidence = (
                f'{label(device)} memory grew suddenly: reading {index + 1} of "{name}" is {size:.1f}MB, and none '
                f"before exceeded {highest:.1f}MB"
            )
            remedy = "compare this step's batch (size, sequence length) with the others'"
            return [_finding("sudden_growth", size - highest, evidence, remedy, device=device)]
        highest = max(highest, size)
    return []


def _gradient(name: str, parameter: nn.Parameter, gradient: torch.Tensor) -> list[dict[str, Any]]:
    size = bytes_of(gradient) / MB
    if wrong := _not_finite(gradient):
        remedy = "check the batch and the loss for NaN, lower the learning rate, or scale the loss under fp16"
        return [_finding("gradient_anomaly", size, f"gradient {wrong}: {name}", remedy, module=name, severity="error")]
    if not parameter.requires_grad:
        remedy = "set its grad to None: it takes memory, and the optimizer has no use for it"
        return [_finding("gradient_anomaly", size, f"frozen parameter with a gradient: {name}", remedy, module=name)]
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    norm = float(torch.linalg.vector_norm(values.detach(), dtype=torch.promote_types(values.dtype, torch.float32)))
    mean = norm / math.sqrt(gradient.numel()) if gradient.numel() else 0.0
    if mean > EXPLODING_GRADIENT:
        evidence = f"gradient of norm {norm:.3g}, entries of {mean:.3g} in the root mean square: {name}"
        remedy = "clip gradients, or lower the learning rate"
        return [_finding("gradient_anomaly", size, evidence, remedy, module=name)]
    return []


def _not_finite(tensor: torch.Tensor) -> str:
    """ "contains NaN", "contains Inf" or "". The extremes tell, without a mask of the tensor's size."""
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
        return "contains NaN"
    return "contains Inf" if any(map(math.isinf, extremes)) else ""
