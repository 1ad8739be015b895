# SPDX-License-Identifier: Apache-2.0
"""Functions for inspecting a running training: snapshots, checkpoints, stages, findings. See docs/toolkit.md.

They are thin wrappers around the session and the allocators' counters: `readings` reads every figure.
"""
