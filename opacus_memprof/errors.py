# SPDX-License-Identifier: Apache-2.0
"""What opacus-memprof raises when the caller can fix it: one sentence that says what was wrong and what to do."""


class MemprofError(Exception):
    """Bad input, or a machine that is not set up for it. The command line prints it and exits with `exit_code`."""

    exit_code = 2
