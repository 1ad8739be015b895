# SPDX-License-Identifier: Apache-2.0
"""Where in the backward pass memory goes, told from modules' names: which layer's backward lets go of what, which
gradients pass by it, and which parts of the model repeat."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from opacus_memprof.analysis.oom.layers import Layer
from opacus_memprof.workload import Module

_NUMBER = re.compile(r"(?:^|\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Unit:
    """Modules of the model that repeat: the same modules under another number."""

    prefix: str
    signature: tuple[tuple[str, str, int, int], ...]


def unit_of(name: str) -> str:
    found = _NUMBER.search(name)
    return name[: found.end()] if found else ""


def repeated_units(modules: Mapping[str, Module]) -> dict[str, Unit]:
    """By prefix, those that have a twin."""
    parts: dict[str, list[tuple[str, str, int, int]]] = {}
    for name, module in modules.items():
        if prefix := unit_of(name):
            parts.setdefault(prefix, []).append((name[len(prefix) :], module.kind, module.rows, module.columns))
    units = {prefix: Unit(prefix, tuple(inside)) for prefix, inside in parts.items()}
    signatures = [unit.signature for unit in units.values()]
    return {prefix: unit for prefix, unit in units.items() if signatures.count(unit.signature) > 1}


def homes_of(modules: Iterable[str], order: Sequence[str]) -> dict[str, str]:
    """The layer with whose backward the activations of each module go: itself, else of those that share the most of its
    name the next one by number, which takes its output, else the last one. Modules without one are left out."""
    homes = {module: module if module in order else _nearest(module, order) for module in modules if module}
    return {module: home for module, home in homes.items() if home}


def _nearest(module: str, order: Sequence[str]) -> str:
    parts, names = module.split("."), [name.split(".") for name in order]
    pairs = [zip(parts, name, strict=False) for name in names]
    shared = [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both)) for both in pairs]
    most = max(shared, default=0)

    def number(name: list[str]) -> int:
        return int(name[most]) if len(name) > most and name[most].isdigit() else -1

    near = [name for name, length in zip(names, shared, strict=True) if length == most]
    later = [name for name in near if number(name) > number(parts) >= 0]
    return ".".join(later[0] if later else near[-1] if most else [])


def spread(layers: Sequence[Layer], missing: int, reached: str) -> list[Layer]:
    """Activations that have gone already, by the sizes of the layers' inputs and outputs: those of the layers behind
    `reached`, to which the backward had come, or of all."""
    names = [layer.name for layer in layers]
    live = names.index(reached) + 1 if reached in names[:-1] else 0
    room = [max(layer.forward.input_bytes + layer.forward.output_bytes - layer.activations, 1) for layer in layers]
    room[:live] = [0] * live
    whole = sum(room)
    return [
        replace(layer, activations=layer.activations + missing * share // whole)
        for layer, share in zip(layers, room, strict=True)
    ]


def with_residuals(layers: Sequence[Layer], blocks: Mapping[str, int], units: Mapping[str, Unit]) -> list[Layer]:
    """The layers, with the gradients that pass by them. A container whose own operations make a block as large as its
    first layer's input adds its branches to that input: the gradient of its output lives until theirs have joined it.

    Args:
        blocks: the largest activation of each module, containers included.
        units: what repeats, of which the containers that are live tell.
    """
    passing: dict[str, int] = {}
    for container, size in blocks.items():
        inside = [layer for layer in layers if container and layer.name.startswith(f"{container}.")]
        if inside and inside[0].forward.input_bytes == size:
            passing |= {layer.name: max(size, passing.get(layer.name, 0)) for layer in inside}
    alike: dict[tuple[object, str], int] = {}
    for layer in layers:
        if key := _in_unit(layer.name, units):
            alike[key] = max(alike.get(key, 0), passing.get(layer.name, 0))
    return [
        replace(layer, passing=passing.get(layer.name) or alike.get(_in_unit(layer.name, units) or (None, ""), 0))
        for layer in layers
    ]


def _in_unit(name: str, units: Mapping[str, Unit]) -> tuple[object, str] | None:
    prefix = unit_of(name)
    return (units[prefix].signature, name[len(prefix) :]) if prefix in units else None
