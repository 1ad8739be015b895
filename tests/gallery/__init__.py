# SPDX-License-Identifier: Apache-2.0
"""Programs after reports of users: `failures` are functions, and `scripts` run out of memory on a virtual GPU."""
