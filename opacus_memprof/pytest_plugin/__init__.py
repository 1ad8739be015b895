# SPDX-License-Identifier: Apache-2.0
"""Memory regression tests with pytest. docs/pytest.md shows how; `plugin` is the entry point."""
