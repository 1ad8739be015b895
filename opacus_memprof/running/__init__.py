# SPDX-License-Identifier: Apache-2.0
"""A program under the profiler, in this process."""
