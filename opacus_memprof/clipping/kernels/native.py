# SPDX-License-Identifier: Apache-2.0
"""Compiled code: imports the extension `_clipping`, which does the work for each layer, and launches Triton kernels.

Every other module imports the extension's names from here.

Raises:
    ImportError: the extension is missing, was built for another torch, or cannot be loaded.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from opacus_memprof.versions import how_to_build, why_there_is_no_extension, why_torch_does_not_fit

try:
    try:
        from opacus_memprof import _build_info
    except ImportError:
        raise ImportError(why_there_is_no_extension()) from None

    if reason := why_torch_does_not_fit(
        _build_info, torch.__version__, torch.version.cuda, Path(torch.__file__).parent
    ):
        raise ImportError(reason)
    from opacus_memprof._clipping import (
        ModuleHook,
        OperationLog,
        add_and_divide,
        address_table,
        begin_tables_of_graph,
        draw_normal,
        embedding_squared_norms_cpu,
        empty_sums,
        end_tables_of_graph,
        graph_patterns,
        group_alike,
        hash_of_shapes,
        is_backward_of_inputs,
        layer_norm_gradients_cpu,
        linear_gradients_cpu,
        norms_cpu,
        product_table,
        reserve_normal,
        squared_norms_cpu,
        sum_outer_products,
        tap_gradient,
        unfold,
        weighted_sums_cpu,
    )
except ImportError as error:
    raise ImportError(f"flash_clip's extension cannot be loaded ({error}): {how_to_build()}") from error

__all__ = [
    "ModuleHook",
    "OperationLog",
    "add_and_divide",
    "address_table",
    "begin_tables_of_graph",
    "draw_normal",
    "embedding_squared_norms_cpu",
    "empty_sums",
    "end_tables_of_graph",
    "graph_patterns",
    "group_alike",
    "hash_of_shapes",
    "is_backward_of_inputs",
    "layer_norm_gradients_cpu",
    "linear_gradients_cpu",
    "norms_cpu",
    "product_table",
    "reserve_normal",
    "squared_norms_cpu",
    "sum_outer_products",
    "tap_gradient",
    "unfold",
    "weighted_sums_cpu",
]


_MOST_COMPILED = 4096  # compiled kernels that are found by their arguments; batch sizes may differ in every step
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, grid: tuple[int, int, int], *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
    """Launches a kernel on the device of its tensors.

    Triton inspects each argument for properties to compile for, such as aligned addresses. This takes the host longer
    than the launch. Here it is done once for arguments that differ only in addresses of the same alignment.

    Args:
        kernel: a function decorated with `triton.jit`.
        grid: the numbers of programs.
        arguments: all arguments except constants, a tensor first.
        num_warps: the number of warps of each program.
        constants: the constants, in the kernel's order.
    """
    like = [(a.dtype, a.data_ptr() % 128) if isinstance(a, torch.Tensor) else (type(a), a) for a in arguments]
    key = (id(kernel), arguments[0].device, num_warps, *like, *constants.values())
    compiled = _compiled.get(key)
    with _on_device(arguments[0]):
        if compiled is not None:
            compiled[grid](*arguments, *constants.values())
            return
        compiled = kernel[grid](*arguments, **constants, num_warps=num_warps)
    if compiled is not None:  # Triton's interpreter compiles nothing
        if len(_compiled) >= _MOST_COMPILED:
            _compiled.clear()
        _compiled[key] = compiled


def _on_device(tensor: torch.Tensor) -> Any:
    """Returns a context in which kernels run on the tensor's device."""
    is_current = not tensor.is_cuda or tensor.device.index == torch.cuda.current_device()
    return nullcontext() if is_current else torch.cuda.device(tensor.device)
