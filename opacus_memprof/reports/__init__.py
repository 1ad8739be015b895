# SPDX-License-Identifier: Apache-2.0
"""What people read, made from profile.json; and exports for other tools, which may need every event."""
