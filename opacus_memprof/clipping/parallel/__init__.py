# SPDX-License-Identifier: Apache-2.0
"""flash_clip on several ranks: DDP, FSDP2, and what the ranks agree on."""
