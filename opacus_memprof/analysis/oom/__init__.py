# SPDX-License-Identifier: Apache-2.0
"""Explains an allocation that failed: what was live, what would have fitted, and what to change.

failure               what was requested, live, free and left over, and the run's peaks before
layers, flash, step   the memory of a training step, from shapes; estimate: of the run's own
predict               the peak, unchanged and after a change
advice                the changes
failure_report        all of it, as oom_report.json
"""

from opacus_memprof.analysis.oom.failure_report import build_report

__all__ = ["build_report"]
