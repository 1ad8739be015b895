# SPDX-License-Identifier: Apache-2.0
"""The names of the markers. They are not in limits.py, which imports torch."""

LIMITS = ("limit_gpu_memory", "limit_gpu_leaks")
ISOLATED = "memprof_isolated"
FITS = "fits"
