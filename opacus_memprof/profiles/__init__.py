# SPDX-License-Identifier: Apache-2.0
"""Profiles: the categories of bytes, the structures of all files, and their directory. Needs no torch.

Not called `profile`, which is the public function that records one.
"""
