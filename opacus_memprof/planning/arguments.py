# SPDX-License-Identifier: Apache-2.0
"""Values for the program's arguments."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from opacus_memprof.errors import MemprofError
from opacus_memprof.planning.configuration import PlannedConfiguration

_VALUES = re.compile(r"(?P<name>[^=\s]+)=(?P<values>\d+(?:,\d+)*)")
_RANGE = re.compile(r"(?P<name>[^=\s]+)=(?P<low>-?\d+)\.\.(?P<high>-?\d+)")


@dataclass(frozen=True)
class Range:
    """The whole values of an argument from `low` to `high`."""

    name: str
    low: int
    high: int

    def apply(self, configuration: PlannedConfiguration, value: int) -> PlannedConfiguration:
        """The configuration with this value of the argument."""
        program = configuration.program
        arguments = with_argument(program.arguments, self.name, value)
        return replace(configuration, program=replace(program, arguments=arguments))

    def doubled(self) -> list[int]:
        """The values from `low` on, each twice the one before, and `high`."""
        values = [self.low]
        while 2 * values[-1] < self.high:
            values.append(2 * values[-1])
        return [*values, self.high] if self.high > self.low else values


@dataclass(frozen=True)
class Search:
    """What --search asks for.

    Attributes:
        searched: the argument whose largest value is searched; None where only values are listed.
        others: by argument, the values that it is searched with: a grid.
    """

    searched: Range | None
    others: Mapping[str, Sequence[int]]


def parse_search(texts: Sequence[str]) -> Search:
    """The first `ARGUMENT=LOW..HIGH` is searched. Of what else there is a grid is made: the values of
    `ARGUMENT=VALUE,VALUE`, and of further ranges those that `Range.doubled` has.

    Raises:
        MemprofError: something is neither, a range has nothing in it, or an argument is named twice.
    """
    searched, others = None, dict[str, Sequence[int]]()
    for text in texts:
        listed = _VALUES.fullmatch(text.strip())
        if listed is None:
            found = parse_range(text)
            if searched is None:
                searched, name, values = found, found.name, []
            else:
                name, values = found.name, found.doubled()
        else:
            name, values = listed["name"], list(dict.fromkeys(map(int, listed["values"].split(","))))
        if name in others or (searched is not None and name == searched.name and values):
            raise MemprofError(f"--search names {name} twice: give it one range, or list its values")
        if values:
            others[name] = values
    return Search(searched, others)


def parse_range(text: str) -> Range:
    """`batch-size=1..4096`. Raises MemprofError for anything else, a range with nothing in it included."""
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise MemprofError(
            f"--search {text!r} is not of the form ARGUMENT=LOW..HIGH, as batch-size=1..4096 is, nor "
            "ARGUMENT=VALUE,VALUE"
        )
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


def parse_settings(text: str) -> list[str]:
    """Settings of torch's allocator, one combination each, of `expandable_segments:True,False`: what has no key is
    another value of the key before. Commas in brackets belong to a value.

    Raises:
        MemprofError: something has no key, or a key no value.
    """
    values: dict[str, list[str]] = {}
    key = ""
    for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text):
        name, colon, value = part.partition(":")
        if colon and "[" not in name:
            key = name.strip()
        else:
            value = part
        if not key or not value.strip():
            raise MemprofError(
                f"--settings {text!r} is not of the form KEY:VALUE, as expandable_segments:True is, or KEY:VALUE,VALUE"
            )
        values.setdefault(key, []).append(value.strip())
    if not values:
        raise MemprofError("--settings names no settings: write them as expandable_segments:True")
    listed = ([f"{name}:{value}" for value in dict.fromkeys(several)] for name, several in values.items())
    return [",".join(combination) for combination in itertools.product(*listed)]


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
