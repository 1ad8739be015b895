# SPDX-License-Identifier: Apache-2.0
"""Values for the program's arguments."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from opacus_memprof.errors import MemprofError
from opacus_memprof.planning.virtual_run import Configuration

_RANGE = re.compile(r"(?P<name>[^=\s]+)=(?P<low>-?\d+)\.\.(?P<high>-?\d+)")


@dataclass(frozen=True)
class Range:
    """The whole values of an argument from `low` to `high`."""

    name: str
    low: int
    high: int

    def apply(self, configuration: Configuration, value: int) -> Configuration:
        """The configuration with this value of the argument."""
        program = configuration.program
        arguments = with_argument(program.arguments, self.name, value)
        return replace(configuration, program=replace(program, arguments=arguments))


def parse_range(text: str) -> Range:
    """`batch-size=1..4096`. Raises MemprofError for anything else, a range with nothing in it included."""
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise MemprofError(f"--search {text!r} is not of the form ARGUMENT=LOW..HIGH, as batch-size=1..4096 is")
    low, high = int(match["low"]), int(match["high"])
    if low > high:
        raise MemprofError(f"--search {text!r} is a range with nothing in it: {low} is more than {high}")
    if low < 1:
        raise MemprofError(f"--search {text!r} begins at {low}, and sizes begin at 1: give a range from 1 on")
    return Range(match["name"], low, high)


def parse_modes(text: str) -> tuple[str, list[str]]:
    """The argument and its values, of `hooks,ghost` (then `mode`) or `clipping=hooks,ghost`."""
    name, equals, listed = text.partition("=")
    if not equals:
        name, listed = "mode", text
    modes = list(dict.fromkeys(mode.strip() for mode in listed.split(",") if mode.strip()))
    if not name.strip() or not modes:
        raise MemprofError(f"--modes {text!r} names no modes: write them as hooks,ghost or ARGUMENT=hooks,ghost")
    return name.strip(), modes


def with_argument(arguments: Sequence[str], name: str, value: object) -> tuple[str, ...]:
    """The arguments with another value of one: in the place of `--name VALUE`, `--name=VALUE` or `name=VALUE` where
    that is given (`_` for `-` as well), and else at the end. A name that begins with `-` is the flag itself."""
    flag = name if name.startswith("-") else f"--{name}"
    wanted = {_dashes(flag)} | ({_dashes(name)} if flag != name else set())
    changed = list(arguments)
    for index, argument in enumerate(arguments):
        given, equals, _ = argument.partition("=")
        if equals and _dashes(given) in wanted:
            changed[index] = f"{given}={value}"
            return tuple(changed)
        if not equals and argument.startswith("-") and _dashes(argument) in wanted and index + 1 < len(arguments):
            changed[index + 1] = str(value)
            return tuple(changed)
    return (*arguments, flag, str(value))


def _dashes(name: str) -> str:
    return name.replace("_", "-")
