# SPDX-License-Identifier: Apache-2.0
"""Changes a running program so that it is recorded: installs the allocator, and reads counters while it runs."""
