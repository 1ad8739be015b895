# SPDX-License-Identifier: Apache-2.0
"""Faults in what is done against rounding, underflow and cancellation in norms and clipped sums."""

from tests.planted_faults.fault import Texts

FAULTS: Texts = {
    "clipping/kernels/sums.py": [
        (
            "Factors of low-precision gradients are rounded to eight bits, and samples exceed the bound.",
            "factors @ flat[:, part].to(factors.dtype)",
            "factors.to(flat.dtype).to(factors.dtype) @ flat[:, part].to(factors.dtype)",
            "integration/clipping_precision",
        ),
        (
            "Factors of low-precision products are rounded to eight bits.",
            "scale = factors[n].to(sum_dtype(g.dtype))",
            "scale = factors[n].to(g.dtype).to(sum_dtype(g.dtype))",
            "integration/clipping_precision::products_are_scaled_and_added_up_in_float32",
        ),
    ],
    "clipping/kernels/norm_bounds.py": [
        (
            "A norm whose terms cancel is taken as it is.",
            "(norms >= least) & (norms < math.inf)",
            "(norms >= 0) & (norms < math.inf)",
            "unit/clipping_norms_bound::opposing_tokens",
        ),
        (
            "A norm whose products underflow is zero, and its factor one.",
            "return torch.finfo(dtype).tiny / _ERROR[dtype]",
            "return 0.0",
            "unit/clipping_norms_bound::factors_out_of_range",
        ),
        (
            "Sums of tokens that cancel are formed in float32, and exceed the bound.",
            "    if not (rounding > squares.sqrt()).any():",
            "    if True:",
            "unit/clipping_norms_bound::a_sample_whose_tokens_cancel_contributes_what_it_may",
        ),
        (
            "Sums of bf16 tokens that cancel are formed in float32, and exceed the bound.",
            "if g.dtype == torch.float64 or not g.is_cpu",
            "if g.dtype != torch.float32 or not g.is_cpu",
            "unit/clipping_norms_bound::a_sample_whose_tokens_cancel_contributes_what_it_may",
        ),
        (
            "A sample exceeds its bound by half a percent before its sum is formed in float64.",
            "_SUM_ERROR = 2.5e-4",
            "_SUM_ERROR = 2.5e-1",
            "unit/clipping_norms_bound::a_sample_whose_tokens_cancel_contributes_what_it_may",
        ),
    ],
    "clipping/layers/small_layers.py": [
        (
            "The norm of an outer product is the sum of its factors' norms.",
            "squares.prod(1)",
            "squares.sum(1)",
            "kind_linear",
        ),
        (
            "A product of which one factor underflows has norm zero.",
            "in_range = ((squares >= least) & (squares < torch.inf)).all(1).all(1)",
            "in_range = (squares < torch.inf).all(1).all(1)",
            "unit/clipping_norms_bound::deferred_norms_of_single_tokens",
        ),
        (
            "A product that underflows has norm zero beside samples that do not.",
            "(squares < torch.inf)).all(1).all(1)",
            "(squares < torch.inf)).all(1).any(1)",
            "unit/clipping_norms_bound::deferred_norms_of_single_tokens",
        ),
    ],
    "clipping/kernels/norms.py": [
        (
            "Norms of low precision are those of gradients with eight bits, and samples exceed the bound.",
            "torch.bmm(g.float(), a.float())",
            "torch.bmm(g, a)",
            "unit/clipping_norms_bound::norms_of_low_precision_are_not_of_rounded_gradients",
        ),
    ],
    "clipping/layers/linear.py": [
        (
            "The per-sample gradients of a bias are rounded to eight bits.",
            "g.sum(tuple(range(1, g.dim() - 1)), dtype=accumulation_dtype(g.dtype))",
            "g.sum(tuple(range(1, g.dim() - 1)))",
            "unit/clipping_norms_bound::norms_of_low_precision_are_not_of_rounded_gradients",
        ),
    ],
}
