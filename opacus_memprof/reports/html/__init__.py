# SPDX-License-Identifier: Apache-2.0
"""Reports as one HTML file each that needs nothing else: no network, no server, no library."""
