# SPDX-License-Identifier: Apache-2.0
"""Options that take several values after one flag: `--seq-lengths 128 256 512`."""

import re
from collections.abc import Callable, Iterable
from typing import Any

from typer.core import TyperCommand

from opacus_memprof.errors import MemprofError

_VALUE = re.compile(r"(?!-)|-\d")  # a negative number is a value, and refused as one


class ListOptionsCommand(TyperCommand):
    """A command whose list options (`list[…]`) accept several values after one flag, or one after each."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        lists = {name for parameter in self.params if getattr(parameter, "multiple", False) for name in parameter.opts}
        return super().parse_args(ctx, repeat_flags(args, lists, ctx.token_normalize_func))


def repeat_flags(arguments: Iterable[str], lists: set[str], normalized: Callable[[str], str]) -> list[str]:
    """Repeats flags before each of their values: `--sizes 1 2` becomes `--sizes 1 --sizes 2`.

    Args:
        arguments: of the command line.
        lists: the flags of list options.
        normalized: maps all spellings of an option to one.

    Raises:
        MemprofError: a flag has no value.
    """
    known = {normalized(name.lstrip("-")) for name in lists}
    result: list[str] = []
    flag, values = "", 0  # the list that is being read
    for argument in [*arguments, "--"]:
        if flag and _VALUE.match(argument):
            result += [flag, argument]
            values += 1
            continue
        if flag and not values:
            raise MemprofError(f"{flag} has no values: give it at least one")
        flag, values = (argument, 0) if normalized(argument.lstrip("-")) in known else ("", 0)
        if not flag:
            result.append(argument)
    return result[:-1]
