# SPDX-License-Identifier: Apache-2.0
"""What a user can change: defects of a run, each with its module, bytes, evidence and remedy.

A detector takes a Run and yields findings. Those that make a run fail or its guarantee wrong come first.
"""

from collections.abc import Callable, Iterator
from typing import Any

from opacus_memprof.analysis.findings import captures, distributed, ghost, gradients, growth
from opacus_memprof.analysis.findings.run import Run

__all__ = ["Run", "find"]

DETECTORS: tuple[Callable[[Run], Iterator[dict[str, Any]]], ...] = (
    ghost.stale_norm_samples,
    captures.without_backward,
    growth.growing_memory,
    gradients.frozen_per_sample_gradients,
    gradients.discarded_gradients,
    gradients.noise_allocated_twice,
    distributed.noise_of_whole_parameters,
    distributed.gradients_reduced_twice,
    ghost.ghost_matrices,
)


def find(run: Run) -> list[dict[str, Any]]:
    """All findings, by detector, the largest first."""
    return [
        finding
        for detector in DETECTORS
        for finding in sorted(detector(run), key=lambda one: (-one["bytes"], one["module"]))
    ]
