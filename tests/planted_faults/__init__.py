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
from tests.planted_faults.fault import Fault, faults_of

_LISTS = (clipping, gradients, rounding, noise_and_steps, parts, ranks, proof, situations, interface, loops)
_LISTS += (findings, planning, profiler, reports, sessions)
FAULTS: list[Fault] = [fault for each in _LISTS for fault in faults_of(each.FAULTS)]
