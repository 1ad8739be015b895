# SPDX-License-Identifier: Apache-2.0
"""What flash_clip computes, on each device: norms, weighted sums, noise. Nothing here knows modules or hooks."""
