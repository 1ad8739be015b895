# SPDX-License-Identifier: Apache-2.0
"""Finds norms of ghost clipping that cost more memory than they save, and norms that are not computed at all."""

from collections.abc import Iterator

from opacus_memprof.analysis.findings.run import Run, common_module, largest
from opacus_memprof.profiles.profile import Finding
from opacus_memprof.profiles.units import format_bytes, format_count


def ghost_matrices(run: Run) -> Iterator[Finding]:
    """Finds norm samplers whose T x T matrices are larger than per-sample gradients would be.

    For a Linear of p outputs and d inputs, B samples of T tokens and s bytes per element, the norm sampler allocates
    s·B·T² bytes three times (twice without a bias), to avoid per-sample gradients of s·B·(p·d + p) bytes.
    """
    facts = run.facts_of("norm_matrices")
    if not facts:
        return
    sizes = {module: fact["bytes"] for module, fact in facts}
    # The matrices of a layer are freed before those of the next one are allocated, so the largest count.
    _, fact = max(facts, key=lambda named_fact: named_fact[1]["bytes"])
    p, d = fact["features"]
    layers = f", and likewise in {format_count(len(sizes) - 1, 'more layer')}" if len(sizes) > 1 else ""
    yield Finding(
        "ghost_matrices",
        common_module(sizes),
        fact["bytes"],
        f"matrices of tokens by tokens take {format_bytes(fact['bytes'])} for "
        f"{format_count(fact['samples'], 'sample')} of {fact['tokens']} tokens; the per-sample gradient "
        f"of {p} by {d} that they avoid would take {format_bytes(fact['gradient_bytes'])}{layers} ({largest(sizes)})",
        'use grad_sample_mode="flash_clip", which makes neither, or "hooks", which makes the gradient',
        gradient_bytes=fact["gradient_bytes"],
        modules=sizes,
    )


def stale_norm_samples(run: Run) -> Iterator[Finding]:
    """Finds Linear layers without norms: their norm sampler returns none for backprops of more than three
    dimensions."""
    for module, fact in run.facts_of("norms_missing"):
        what = "it keeps an earlier batch's" if fact["bytes"] else "it has none, and clipping fails"
        yield Finding(
            "stale_norm_samples",
            module,
            fact["bytes"],
            f"Opacus computes no norms for outputs of {fact['dimensions']} dimensions: {what}. What this layer adds to "
            "a sample's gradient is not bounded by max_grad_norm, and the privacy guarantee does not hold",
            "flatten all dimensions between the first and the last into one before this layer, or use "
            'grad_sample_mode="hooks"',
        )
