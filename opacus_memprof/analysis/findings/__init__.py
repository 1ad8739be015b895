# SPDX-License-Identifier: Apache-2.0
"""Findings: defects of a run that a user can fix, each with its module, bytes, evidence and remedy.

A detector takes a Run and yields findings. Detectors of defects that make a run fail, or its privacy guarantee wrong,
come first.
"""

from collections.abc import Callable, Iterator

from opacus_memprof.analysis.findings import captures, distributed, ghost, gradients, growth
from opacus_memprof.analysis.findings.run import Run
from opacus_memprof.profiles.profile import Finding

__all__ = ["Run", "find"]

DETECTORS: tuple[Callable[[Run], Iterator[Finding]], ...] = (
    ghost.stale_norm_samples,
    captures.captures_without_backward,
    growth.growing_memory,
    gradients.frozen_per_sample_gradients,
    gradients.discarded_gradients,
    gradients.copied_per_sample_gradients,
    gradients.noise_allocated_twice,
    distributed.noise_of_whole_parameters,
    distributed.gradients_reduced_twice,
    ghost.ghost_matrices,
)


def find(run: Run) -> list[Finding]:
    """All findings in the order of DETECTORS; of each detector, the largest first."""
    return [
        finding
        for detector in DETECTORS
        for finding in sorted(detector(run), key=lambda finding: (-finding.bytes, finding.module))
    ]
