# SPDX-License-Identifier: Apache-2.0
"""What the profiler, flash_clip, plans and the virtual GPU cost, and how exact they are; see README.md."""
