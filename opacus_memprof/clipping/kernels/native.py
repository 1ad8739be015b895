# SPDX-License-Identifier: Apache-2.0
"""Imports the compiled extension `_clipping`, which does the work for each layer.

Every other module imports its names from here.

Raises:
    ImportError: the extension is missing, was built for another torch, or cannot be loaded.
"""

from pathlib import Path

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
        raise ImportError(f"it was {reason}")
    from opacus_memprof._clipping import (
        address_table,
        begin_tables_of_graph,
        draw_normal,
        empty_sums,
        end_tables_of_graph,
        graph_patterns,
        group_alike,
        layer_norm_gradients_cpu,
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
    "address_table",
    "begin_tables_of_graph",
    "draw_normal",
    "empty_sums",
    "end_tables_of_graph",
    "graph_patterns",
    "group_alike",
    "layer_norm_gradients_cpu",
    "product_table",
    "reserve_normal",
    "squared_norms_cpu",
    "sum_outer_products",
    "tap_gradient",
    "unfold",
    "weighted_sums_cpu",
]
