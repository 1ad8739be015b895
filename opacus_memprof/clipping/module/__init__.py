# SPDX-License-Identifier: Apache-2.0
"""The module and the hooks of flash_clip, and the calls of the model that they follow."""
