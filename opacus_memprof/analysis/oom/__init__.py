# SPDX-License-Identifier: Apache-2.0
"""Explains an allocation that failed: what was live, what would have fitted, and what to change.

failure               what was requested, what was live and free, and the run's peaks before
leftovers             blocks that should have been released before
layers, flash, step   the memory of a training step, from shapes; estimate: of the run's own
predict               the peak, unchanged and after a change
advice                the changes
failure_report        all of it, as oom_report.json
"""

from opacus_memprof.analysis.oom.failure_report import build_report

__all__ = ["build_report"]
