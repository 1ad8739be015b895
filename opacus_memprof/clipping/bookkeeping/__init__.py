# SPDX-License-Identifier: Apache-2.0
"""What backward keeps of each layer until the optimizer's step, and the clip factors that follow from it."""
