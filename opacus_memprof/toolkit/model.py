# SPDX-License-Identifier: Apache-2.0
"""Analyzes the memory of a model's parameters, buffers and gradients. Sizes in MB of 2**20 bytes."""

import sys
from typing import Any, TypedDict

import torch
from rich.cells import cell_len
from torch import nn

from opacus_memprof.errors import MemprofError
from opacus_memprof.language import tr
from opacus_memprof.profiles.profile import Finding
from opacus_memprof.toolkit import anomalies, output
from opacus_memprof.toolkit.output import LOGGER, MB


class ParameterSize(TypedDict):
    """One parameter of a model."""

    name: str
    shape: list[int]
    dtype: str
    device: str
    numel: int
    memory_mb: float
    trainable: bool


class LayerSize(TypedDict):
    """The numbers of all and of trainable parameters of a layer, and their memory."""

    total: int
    trainable: int
    memory_mb: float


class ModelMemory(TypedDict):
    """The memory of a model: `total_memory_mb` is the sum of parameters, buffers, gradients and grad_sample."""

    total_memory_mb: float
    parameters_mb: float
    buffers_mb: float
    gradients_mb: float
    per_sample_gradients_mb: float


class ModelAnalysis(TypedDict):
    """The numbers of all and of trainable parameters of a model, its memory, and its anomalies."""

    name: str
    total: int
    trainable: int
    memory_mb: float
    param_efficiency: float
    parameters: list[ParameterSize]
    layers: dict[str, LayerSize]
    summary: ModelMemory
    findings: list[Finding]


def analyze_model(model: nn.Module, name: str = "model") -> ModelAnalysis:
    """Counts a model's parameters and bytes, and logs them.

    Shared parameters count once; Opacus' wrapper does not count. Reports contain the tables of parameters and layers,
    and the findings, from then on.

    Args:
        model: the model.
        name: its name in the log and in reports.

    Returns:
        {"name", "total", "trainable" (parameters), "memory_mb" (parameters and buffers), "param_efficiency" (percent
        trainable), "parameters": [{"name", "shape", "dtype", "device", "numel", "memory_mb", "trainable"}], "layers":
        {"layers.0": {"total", "trainable", "memory_mb"}}, "summary": {"total_memory_mb" (parameters, buffers and
        gradients), "parameters_mb", "buffers_mb", "gradients_mb", "per_sample_gradients_mb"}, "findings" (anomalies of
        its parameters and gradients)}. A layer is a module of a list, or of the top level.

    Raises:
        MemprofError: `model` is not an nn.Module.
    """
    analysis = analyze(model, name)
    session = sys.modules.get("opacus_memprof.session")  # which needs the extension
    if session is not None and session.current() is not None:  # it attributes a model, even if nothing ever trains it
        from opacus_memprof.hooks import search_owners

        search_owners()
    LOGGER.info(tr("model analysis: {name}", name=name))
    LOGGER.info(tr("  total parameters: {total:,}", total=analysis["total"]))
    LOGGER.info(tr("  trainable parameters: {trainable:,}", trainable=analysis["trainable"]))
    LOGGER.info(tr("  memory: {size:.2f} MB", size=analysis["memory_mb"]))
    LOGGER.info(tr("  parameter efficiency: {share:.2f}%", share=analysis["param_efficiency"]))
    anomalies.log(analysis["findings"])
    output.add_to_journal("model", analysis)
    return analysis


def analyze(model: nn.Module, name: str = "model") -> ModelAnalysis:
    """Does the same as `analyze_model`, without log and journal.

    Raises:
        MemprofError: `model` is not an nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise MemprofError(f"cannot analyze a {type(model).__name__}: pass an nn.Module")
    inner = getattr(model, "_module", None)  # of Opacus' GradSampleModule
    module = inner if isinstance(inner, nn.Module) else model
    parameters = [_parameter(path, parameter) for path, parameter in module.named_parameters()]
    layers: dict[str, LayerSize] = {}
    for entry in parameters:
        layer = layers.setdefault(layer_name(entry["name"]), {"total": 0, "trainable": 0, "memory_mb": 0.0})
        layer["total"] += entry["numel"]
        layer["trainable"] += entry["numel"] * entry["trainable"]
        layer["memory_mb"] += entry["memory_mb"]
    total = sum(entry["numel"] for entry in parameters)
    trainable = sum(entry["numel"] * entry["trainable"] for entry in parameters)
    parameters_mb = sum(entry["memory_mb"] for entry in parameters)
    buffers_mb = sum(buffer.nbytes for buffer in module.buffers()) / MB
    gradients_mb = sum(_gradient_bytes(parameter.grad) for parameter in module.parameters()) / MB
    samples_mb = sum(_gradient_bytes(getattr(parameter, "grad_sample", None)) for parameter in module.parameters()) / MB
    return {
        "name": name,
        "total": total,
        "trainable": trainable,
        "memory_mb": parameters_mb + buffers_mb,
        "param_efficiency": 100 * trainable / total if total else 0.0,
        "parameters": parameters,
        "layers": layers,
        "summary": {
            "total_memory_mb": parameters_mb + buffers_mb + gradients_mb + samples_mb,
            "parameters_mb": parameters_mb,
            "buffers_mb": buffers_mb,
            "gradients_mb": gradients_mb,
            "per_sample_gradients_mb": samples_mb,
        },
        "findings": anomalies.find_in_model(module),
    }


def describe_model(analysis: ModelAnalysis) -> list[str]:
    """Returns the lines of a report: the model, its layers, and its parameters."""
    lines = [
        tr(
            "model {name}: {total:,} parameters, {trainable:,} of them trainable ({share:.2f}%), {size:.2f}MB with "
            "buffers",
            name=analysis["name"],
            total=analysis["total"],
            trainable=analysis["trainable"],
            share=analysis["param_efficiency"],
            size=analysis["memory_mb"],
        )
    ]
    layers, parameters = analysis["layers"], analysis["parameters"]
    width = max([len("parameter"), *map(len, layers), *(len(entry["name"]) for entry in parameters)])
    lines.append(_row(width, tr("layer"), tr("parameters"), tr("trainable"), "MB"))
    for name, layer in layers.items():
        lines.append(_row(width, name, f"{layer['total']:,}", f"{layer['trainable']:,}", f"{layer['memory_mb']:.2f}"))
    heading = _row(width, tr("parameter"), tr("elements"), tr("trainable"), "MB")
    lines.append(f"{heading}  {tr('shape, type, device')}")
    for entry in parameters:
        trainable = tr("yes") if entry["trainable"] else tr("no")
        row = _row(width, entry["name"], f"{entry['numel']:,}", trainable, f"{entry['memory_mb']:.2f}")
        lines.append(f"{row}  {entry['shape']}, {entry['dtype']}, {entry['device']}")
    return lines


def _row(width: int, name: str, *cells: str) -> str:
    """Returns a line of a table; a Chinese character takes two columns."""
    columns = [" " * (size - cell_len(cell)) + cell for cell, size in zip(cells, (14, 14, 12), strict=True)]
    return f"  {name}{' ' * (width - cell_len(name))}{''.join(columns)}"


def layer_name(parameter: str) -> str:
    """Returns "model.layers.0" for "model.layers.0.attention.q.weight": up to the first number, or the first name."""
    parts = parameter.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return parts[0]


def _parameter(path: str, parameter: nn.Parameter) -> ParameterSize:
    return {
        "name": path,
        "shape": list(parameter.shape),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": str(parameter.device),
        "numel": parameter.numel(),
        "memory_mb": parameter.nbytes / MB,
        "trainable": parameter.requires_grad,
    }


def _gradient_bytes(gradient: Any) -> int:
    """Returns the bytes of a gradient, or of a list of per-sample gradients."""
    if isinstance(gradient, torch.Tensor):
        return anomalies.tensor_bytes(gradient)
    return sum(map(_gradient_bytes, gradient)) if isinstance(gradient, (list, tuple)) else 0
