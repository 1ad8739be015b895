# SPDX-License-Identifier: Apache-2.0
"""Writes reports for people from profile.json, and exports for other tools, some of them from every event."""
