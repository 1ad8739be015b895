# SPDX-License-Identifier: Apache-2.0
"""Options that take several values after one flag: `--seq-lengths 128 256 512`."""

import re
from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand

from opacus_memprof.errors import MemprofError

_VALUE = re.compile(r"(?!-)|-\d")  # a negative number is a value, and refused as one


class ListsCommand(TyperCommand):
    """A command whose options of several values (`list[…]`) take them after one flag, or each after its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        lists = {name for parameter in self.params if getattr(parameter, "multiple", False) for name in parameter.opts}
        return super().parse_args(ctx, spread(args, lists))


def spread(arguments: Iterable[str], lists: set[str]) -> list[str]:
    """With `--sizes 1 2` as `--sizes 1 --sizes 2`, for the flags in `lists`, however their words are joined.

    Raises:
        MemprofError: a flag without a value.
    """
    known = {name.replace("_", "-") for name in lists}
    result: list[str] = []
    flag, values = "", 0  # the list that is being read
    for argument in [*arguments, "--"]:
        if flag and _VALUE.match(argument):
            result += [flag, argument]
            values += 1
            continue
        if flag and not values:
            raise MemprofError(f"{flag} has no values: give it at least one")
        flag, values = (argument, 0) if argument.replace("_", "-") in known else ("", 0)
        if not flag:
            result.append(argument)
    return result[:-1]
