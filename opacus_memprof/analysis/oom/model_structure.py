# SPDX-License-Identifier: Apache-2.0
"""The structure of a model, from the names of its modules.

Tells which units repeat, which layer's backward releases which activations, and where residual streams run.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from opacus_memprof.analysis.oom.layers import Layer
from opacus_memprof.profiles.layer_shapes import LayerShape

_NUMBER = re.compile(r"(?:^|\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class RepeatedUnit:
    """A numbered part of the model, such as `encoder.layers.0`, that has the same modules as another one.

    Attributes:
        prefix: its name.
        signature: (name inside of the unit, class, rows, columns) of each module. Equal units have equal signatures.
    """

    prefix: str
    signature: tuple[tuple[str, str, int, int], ...]


def unit_prefix(name: str) -> str:
    """Returns the name up to its first number: `encoder.layers.0` of `encoder.layers.0.linear1`. Empty without one."""
    match = _NUMBER.search(name)
    return name[: match.end()] if match else ""


def repeated_units(modules: Mapping[str, LayerShape]) -> dict[str, RepeatedUnit]:
    """Returns the units that equal another one, by prefix."""
    parts: dict[str, list[tuple[str, str, int, int]]] = {}
    for name, module in modules.items():
        if prefix := unit_prefix(name):
            parts.setdefault(prefix, []).append((name[len(prefix) :], module.kind, module.rows, module.columns))
    units = {prefix: RepeatedUnit(prefix, tuple(inside)) for prefix, inside in parts.items()}
    signatures = [unit.signature for unit in units.values()]
    return {prefix: unit for prefix, unit in units.items() if signatures.count(unit.signature) > 1}


def releasing_layers(modules: Iterable[str], order: Sequence[str]) -> dict[str, str]:
    """Returns, for each module, the layer whose backward releases the module's activations.

    That is the module itself, if it is a layer. Otherwise it is one of the layers that share the longest part of its
    name: the next one by number, which uses its output, or else the last one. Modules without one are left out.

    Args:
        modules: names of modules that have activations.
        order: the names of layers, in forward order.
    """
    layers = {module: module if module in order else _nearest(module, order) for module in modules if module}
    return {module: layer for module, layer in layers.items() if layer}


def _nearest(module: str, order: Sequence[str]) -> str:
    parts, names = module.split("."), [name.split(".") for name in order]
    pairs = [zip(parts, name, strict=False) for name in names]
    shared = [sum(1 for _ in takewhile(lambda parts: parts[0] == parts[1], pair)) for pair in pairs]
    longest = max(shared, default=0)

    def number(name: list[str]) -> int:
        return int(name[longest]) if len(name) > longest and name[longest].isdigit() else -1

    nearest = [name for name, length in zip(names, shared, strict=True) if length == longest]
    later = [name for name in nearest if number(name) > number(parts) >= 0]
    return ".".join(later[0] if later else nearest[-1] if longest else [])


def distribute_missing(layers: Sequence[Layer], missing: int, reached: str) -> list[Layer]:
    """Adds activations that have been released already to layers, in proportion to their inputs and outputs.

    Args:
        layers: in forward order.
        missing: bytes of these activations.
        reached: the layer whose backward was running; only later layers have released activations. Empty: all have.
    """
    names = [layer.name for layer in layers]
    live = names.index(reached) + 1 if reached in names[:-1] else 0
    weights = [max(layer.forward.input_bytes + layer.forward.output_bytes - layer.activations, 1) for layer in layers]
    weights[:live] = [0] * live
    total = sum(weights)
    return [
        replace(layer, activations=layer.activations + missing * weight // total)
        for layer, weight in zip(layers, weights, strict=True)
    ]


def with_residual_gradients(
    layers: Sequence[Layer], largest_blocks: Mapping[str, int], units: Mapping[str, RepeatedUnit]
) -> list[Layer]:
    """Returns the layers, with the gradients of residual streams that live through their backward.

    A container adds its branches to its input if its own operations save a block of the size of its first layer's
    input. The gradient of its output then lives until the gradients of the branches have been added to it.

    Args:
        layers: in forward order.
        largest_blocks: the largest activation of each module, including containers.
        units: containers whose activations are live show what all units of the same signature do.
    """
    gradients: dict[str, int] = {}
    for container, size in largest_blocks.items():
        inside = [layer for layer in layers if container and layer.name.startswith(f"{container}.")]
        if inside and inside[0].forward.input_bytes == size:
            gradients |= {layer.name: max(size, gradients.get(layer.name, 0)) for layer in inside}
    in_units: dict[tuple[object, str], int] = {}
    for layer in layers:
        if key := _place_in_unit(layer.name, units):
            in_units[key] = max(in_units.get(key, 0), gradients.get(layer.name, 0))
    result = []
    for layer in layers:
        in_unit = in_units.get(_place_in_unit(layer.name, units) or (None, ""), 0)
        result.append(replace(layer, residual_gradient=gradients.get(layer.name) or in_unit))
    return result


def _place_in_unit(name: str, units: Mapping[str, RepeatedUnit]) -> tuple[object, str] | None:
    """Returns the unit's signature, and the name inside of the unit."""
    prefix = unit_prefix(name)
    return (units[prefix].signature, name[len(prefix) :]) if prefix in units else None
