# SPDX-License-Identifier: Apache-2.0
"""Faults that tests must catch: ``python -m tests.planted_faults`` plants one after the other.

Each is a small change that a reviewer could miss. Most make clipping wrong or switch off a check of it; those in
`findings`, `planning`, `profiler`, `reports` and `sessions` make figures or reports wrong.
"""

from tests.planted_faults import (
    clipping,
    findings,
    gradients,
    interface,
    loops,
    noise_and_steps,
    parts,
    planning,
    profiler,
    proof,
    ranks,
    reports,
    rounding,
    sessions,
    situations,
)
from tests.planted_faults.fault import Fault

FAULTS: list[Fault] = [
    *clipping.FAULTS,
    *gradients.FAULTS,
    *rounding.FAULTS,
    *noise_and_steps.FAULTS,
    *parts.FAULTS,
    *ranks.FAULTS,
    *proof.FAULTS,
    *situations.FAULTS,
    *interface.FAULTS,
    *loops.FAULTS,
    *findings.FAULTS,
    *planning.FAULTS,
    *profiler.FAULTS,
    *reports.FAULTS,
    *sessions.FAULTS,
]
