# SPDX-License-Identifier: Apache-2.0
"""An oracle for the profiler: what Opacus must allocate, in bytes, by arithmetic alone."""
