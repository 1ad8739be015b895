# SPDX-License-Identifier: Apache-2.0
"""Forensics of an allocation that failed: who holds what, what would have fitted, and what to change.

failure, left      what was asked for, what was live, and what should not have been
history            the run's highest instants before
room               what would have fitted
layers, step       what a step takes, from shapes; estimate: the run's own step
predict            the peak as it is and after a change
advice             the changes
report             all of it, as oom_report.json
"""

from opacus_memprof.analysis.oom.report import build_report

__all__ = ["build_report"]
