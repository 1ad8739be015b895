# SPDX-License-Identifier: Apache-2.0
"""Callbacks for training frameworks, one file each (docs/frameworks.md). Each imports its framework only."""
