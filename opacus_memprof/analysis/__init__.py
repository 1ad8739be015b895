# SPDX-License-Identifier: Apache-2.0
"""Builds profile.json from the files of a profile directory."""
