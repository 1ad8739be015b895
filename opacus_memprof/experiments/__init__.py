# SPDX-License-Identifier: Apache-2.0
"""Training runs of a known configuration under the profiler: one in a separate process, or many side by side."""
