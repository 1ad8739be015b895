# SPDX-License-Identifier: Apache-2.0
"""Configurations side by side: a grid of them, the processes that run them, and what their results show together."""
