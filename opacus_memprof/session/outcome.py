# SPDX-License-Identifier: Apache-2.0
"""Describes how a program has ended, from the exception that ended it."""

from opacus_memprof.session.out_of_memory import is_out_of_memory


def outcome(error: BaseException | None) -> tuple[str, int]:
    """A program's status and exit code, from the exception that ended it (None: it came to its end)."""
    code = 1
    if error is None:
        code = 0
    elif isinstance(error, KeyboardInterrupt):
        return "killed", 130
    elif isinstance(error, SystemExit):
        code = 0 if error.code is None else error.code & 0xFF if isinstance(error.code, int) else 1
    if code == 0:
        return "finished", 0
    return "out_of_memory" if is_out_of_memory(error) else "failed", code


def one_line(error: BaseException | None) -> str | None:
    """What went wrong, for people: the exception's kind and its message's first line."""
    if error is None or (isinstance(error, SystemExit) and not isinstance(error.code, str)):
        return None
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
