# SPDX-License-Identifier: Apache-2.0
"""A forward of a module: where its samples are, what it draws and changes, and how it is repeated."""
