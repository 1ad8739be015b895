# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin, and the names of its markers. Importing this does not load torch."""

LIMITS = ("limit_gpu_memory", "limit_gpu_leaks")
ISOLATED = "memprof_isolated"
FITS = "fits"
