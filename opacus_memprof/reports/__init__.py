# SPDX-License-Identifier: Apache-2.0
"""What people read, made from profile.json alone."""
