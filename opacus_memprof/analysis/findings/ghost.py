# SPDX-License-Identifier: Apache-2.0
"""Ghost clipping: norms that cost more memory than they save, and norms that are not computed at all."""

from collections.abc import Iterator
from typing import Any

from opacus_memprof.analysis.findings.run import Run, common_module, finding, largest
from opacus_memprof.units import format_bytes


def ghost_matrices(run: Run) -> Iterator[dict[str, Any]]:
    """A Linear of p outputs and d inputs, B samples of T tokens, s bytes an element: the norm sampler holds s·B·T²
    bytes three times (twice without a bias), to avoid a per-sample gradient of s·B·(p·d + p). Found where it holds
    more than it avoids."""
    noted = run.noted("norm_matrices")
    if not noted:
        return
    sizes = {module: fact["bytes"] for module, fact in noted}
    # One layer's are gone before the next one's are made: what they cost at any time is the largest.
    _, fact = max(noted, key=lambda one: one[1]["bytes"])
    p, d = fact["features"]
    layers = f", and likewise in {len(sizes) - 1} more layers" if len(sizes) > 1 else ""
    yield finding(
        "ghost_matrices",
        common_module(sizes),
        fact["bytes"],
        f"matrices of tokens by tokens take {format_bytes(fact['bytes'])} for {fact['samples']} samples of "
        f"{fact['tokens']} tokens; the per-sample gradient of {p} by {d} that they avoid would take "
        f"{format_bytes(fact['gradient_bytes'])}{layers} ({largest(sizes)})",
        'use grad_sample_mode="flash_clip", which makes neither, or "hooks", which makes the gradient',
        gradient_bytes=fact["gradient_bytes"],
        modules=sizes,
    )


def stale_norm_samples(run: Run) -> Iterator[dict[str, Any]]:
    """The norm sampler of Linear returns nothing for backprops of more than three dimensions."""
    for module, fact in run.noted("norms_missing"):
        what = "it keeps an earlier batch's" if fact["bytes"] else "it has none, and clipping fails"
        yield finding(
            "stale_norm_samples",
            module,
            fact["bytes"],
            f"Opacus computes no norms for outputs of {fact['dimensions']} dimensions: {what}. What this layer adds to "
            "a sample's gradient is not bounded by max_grad_norm, and the privacy guarantee does not hold",
            "flatten all dimensions between the first and the last into one before this layer, or use "
            'grad_sample_mode="hooks"',
        )
