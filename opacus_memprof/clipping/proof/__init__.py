# SPDX-License-Identifier: Apache-2.0
"""Proves during training that clipping is exact. docs/flash_clip.md says what is checked when.

`situations` proves flash_clip, and `opacus_modes` checks Opacus' own modes.
"""
