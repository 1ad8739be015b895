# SPDX-License-Identifier: Apache-2.0
"""Callbacks for the frameworks that people train with, one file each. docs/frameworks.md shows them.

None is loaded before it is imported, and each needs its framework only.
"""
