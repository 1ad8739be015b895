# SPDX-License-Identifier: Apache-2.0
"""The tensors that backward keeps for each layer until the optimizer's step, and the clip factors."""
