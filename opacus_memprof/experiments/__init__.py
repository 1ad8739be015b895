# SPDX-License-Identifier: Apache-2.0
"""Training runs of a known configuration under the profiler: one in a process of its own, or many side by side."""
