# SPDX-License-Identifier: Apache-2.0
"""Proves, while a training runs, that clipping is exact. See docs/flash_clip.md for what is checked when.

`situations` has the proof of flash_clip, `opacus_modes` the check of Opacus' own modes.
"""
