# SPDX-License-Identifier: Apache-2.0
"""The computations of flash_clip on each device: norms, weighted sums, noise. Independent of modules and hooks."""
