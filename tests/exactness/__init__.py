# SPDX-License-Identifier: Apache-2.0
"""Programs made to break flash_clip's guarantee: every step is exact, or refused before a parameter changes."""
