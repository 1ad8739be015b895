# SPDX-License-Identifier: Apache-2.0
"""For a look in the middle of a training run: snapshots, checkpoints, stages, findings. docs/toolkit.md shows them.

Thin faces of the session and the allocators' counters: `readings` is where every figure comes from.
"""
