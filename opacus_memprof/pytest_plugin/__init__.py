# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin for memory regression tests (docs/pytest.md), and its markers' names.

Its entry point is `plugin`.
"""

LIMITS = ("limit_gpu_memory", "limit_gpu_leaks")
ISOLATED = "memprof_isolated"
FITS = "fits"
