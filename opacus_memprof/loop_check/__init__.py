# SPDX-License-Identifier: Apache-2.0
"""Follows a program's private training loop for two logical steps and compares each with clipping by hand."""
