# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin for memory regression tests (docs/pytest.md). `plugin` is the entry point."""
