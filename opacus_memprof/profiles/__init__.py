# SPDX-License-Identifier: Apache-2.0
"""Profiles: the categories of bytes, the structures of all files, and their directory. Needs no torch.

The package is not called `profile`, because that is the public function that records one.
"""
