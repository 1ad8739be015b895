# SPDX-License-Identifier: Apache-2.0
"""Data that hooks observe and the event file does not contain: observations for findings, and layer shapes.

An observation has a kind, a module and bytes. For each kind and module only the one with the most bytes is kept (the
latest of several), so their number is bounded by the number of modules.
"""

from collections.abc import Callable
from typing import Any

import torch

from opacus_memprof.profiles.layer_shapes import TrainingShapes
from opacus_memprof.recording import native

_observations: dict[tuple[str, int], dict[str, Any]] = {}
_captures_before: dict[int, int] = {}  # outstanding when the session began
_layer_shapes = TrainingShapes()
_on_clear: list[Callable[[], object]] = []


def on_clear(callback: Callable[[], object]) -> None:
    """Registers `callback` to be called whenever a session begins."""
    _on_clear.append(callback)


def clear() -> None:
    """Discards everything. Called when a session begins, which does not count captures that are outstanding then."""
    global _layer_shapes
    for callback in _on_clear:
        callback()
    _layer_shapes = TrainingShapes()
    _observations.clear()
    _captures_before.clear()
    _captures_before.update(native.captures())


def layer_shapes() -> TrainingShapes:
    """Returns the layer shapes of the running session, or of the latest one if none is running."""
    return _layer_shapes


def record_gpu(device: Any) -> None:
    """Records what layer_shapes has about a GPU."""
    properties = torch.cuda.get_device_properties(device)
    layer_shapes().multiprocessors = properties.multi_processor_count
    # torch's choice, for Hopper and later, and for others.
    layer_shapes().workspace = 32 * 2**20 if properties.major >= 9 else 8320 * 2**10
    layer_shapes().has_bfloat16 = properties.major >= 8  # earlier ones have no kernels for it


def record(kind: str, module: int, bytes: int, **details: Any) -> None:
    """Records an observation, unless there is one with more bytes. `module` is a module id."""
    present = _observations.get((kind, module))
    if present is None or present["bytes"] <= bytes:
        _observations[kind, module] = {"kind": kind, "module": module, "bytes": bytes, **details}


def discard(kind: str) -> None:
    """Discards the observations of one kind, because they have proved wrong."""
    for key in [key for key in _observations if key[0] == kind]:
        del _observations[key]


def recorded() -> list[dict[str, Any]]:
    """Returns the session's observations, each {"kind", "module": id, "bytes", ...}, ordered by kind and module.

    Observations of captures are omitted if a backward pass has released all captures since then.
    """
    outstanding = captures()
    return [_observations[key] for key in sorted(_observations) if key[0] != "captures" or outstanding]


def captures() -> dict[int, int]:
    """Returns the captures of this session's forward passes that no backward pass has released: module id → number."""
    outstanding = native.captures()
    if not outstanding:
        return outstanding
    since = {module: count - _captures_before.get(module, 0) for module, count in outstanding.items()}
    return {module: count for module, count in since.items() if count > 0}
