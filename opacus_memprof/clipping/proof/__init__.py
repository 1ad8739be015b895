# SPDX-License-Identifier: Apache-2.0
"""Proofs that a step clips exactly: what a grad_sample_mode found is compared with plain autograd on the same batch."""
