# SPDX-License-Identifier: Apache-2.0
"""From the files of a profile directory to profile.json."""
