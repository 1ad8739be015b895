# SPDX-License-Identifier: Apache-2.0
"""Reports as single HTML files, which need no network, server or library."""
