# SPDX-License-Identifier: Apache-2.0
"""The exception for errors that the caller can fix."""


class MemprofError(Exception):
    """Bad input, or a machine that is not set up for it: one sentence with the problem and the remedy.

    The command line prints it and exits with `exit_code`.
    """

    exit_code = 2
