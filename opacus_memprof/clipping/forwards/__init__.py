# SPDX-License-Identifier: Apache-2.0
"""A forward of a module: where its tensors have the samples, what it draws and changes, and how it is repeated."""
