# SPDX-License-Identifier: Apache-2.0
"""Proves, while a training runs, that clipping is exact: samples do not mix, and layers find autograd's gradients.

See docs/flash_clip.md for what is checked when.
"""
