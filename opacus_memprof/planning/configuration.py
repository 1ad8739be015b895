# SPDX-License-Identifier: Apache-2.0
"""The configuration of a plan: a program on a virtual GPU, and the values of the program's arguments."""

import ast
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from opacus_memprof.errors import MemprofError

_VALUES = re.compile(r"(?P<name>[^=\s]+)=(?P<values>(?!\S*\.\.)[^,\s]+(?:,[^,\s]+)*)")
_RANGE = re.compile(r"(?P<name>[^=\s]+)=(?P<low>-?\d+)\.\.(?P<high>-?\d+)")
_VARIABLE = "env:"
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")
_BATCH = re.compile(r"(?<![^\W_])\w*?(?:batch(?:_?size)?|bs)(?![^\W_])\w*", re.IGNORECASE)
_BATCH_NUMBER = re.compile(
    _BATCH.pattern + r"[\"']?\]?\s*(?::\s*int\s*=|[:=])\s*(?P<number>\d+)(?![\w.])", re.IGNORECASE
)
_FLAG = re.compile(r"--[\w-]*(?:batch|bs)[\w-]*", re.IGNORECASE)
_READS_VARIABLE = re.compile(r"environ|getenv")
_LONG = 60  # characters of a line that is shown

Value = int | str  # of an argument of the program


@dataclass(frozen=True)
class PlannedProgram:
    """The program: a script, or with `module` a module, and its arguments. `title` is shown instead, if given."""

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    title: str = ""

    @property
    def name(self) -> str:
        return self.title or self.target

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments that the user has given; none if the program has a title."""
        return () if self.title else self.arguments


@dataclass(frozen=True)
class PlannedConfiguration:
    """A program on a kind of virtual GPU.

    Attributes:
        memory: bytes of the GPU; None for the default of its kind.
        ranks: processes of the job, each with a GPU. Only the first one is run.
        changes: actions of a suggestion (docs/oom.md) that are applied without changing the program.
    """

    program: PlannedProgram
    gpu: str
    memory: int | None = None
    changes: tuple[Mapping[str, Any], ...] = ()
    ranks: int = 1

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "changes": [dict(change) for change in self.changes]}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "PlannedConfiguration":
        program = content["program"]
        return cls(
            PlannedProgram(program["target"], tuple(program["arguments"]), program["module"]),
            content["gpu"],
            content["memory"],
            tuple(content["changes"]),
            content["ranks"],
        )


@dataclass(frozen=True)
class Range:
    """The whole values of an argument from `low` to `high`."""

    name: str
    low: int
    high: int

    def apply(self, configuration: PlannedConfiguration, value: int) -> PlannedConfiguration:
        """Returns the configuration with this value of the argument."""
        return with_value(configuration, self.name, value)

    def doubled(self) -> list[int]:
        """Returns `low`, values that each are twice the previous one, and `high`."""
        values = [self.low]
        while 2 * values[-1] < self.high:
            values.append(2 * values[-1])
        return [*values, self.high] if self.high > self.low else values


@dataclass(frozen=True)
class Search:
    """The content of --search.

    Attributes:
        searched: the argument whose largest value is searched; None if only values are listed.
        others: the values of the other arguments of the grid, by argument.
    """

    searched: Range | None
    others: Mapping[str, Sequence[Value]]


def parse_search(texts: Sequence[str]) -> Search:
    """Parses --search. The first `ARGUMENT=LOW..HIGH` is searched.

    The others form a grid: the numbers or words of `ARGUMENT=VALUE,VALUE`, and `Range.doubled` of further ranges.

    Raises:
        MemprofError: a text has neither form, a range is empty, an argument is named twice, or a line of a file has no
            number to replace.
    """
    searched, others = None, dict[str, Sequence[Value]]()
    for text in texts:
        values: Sequence[Value] = []
        listed = _VALUES.fullmatch(text.strip())
        if listed is None:
            found = parse_range(text)
            if searched is None:
                searched, name = found, found.name
            else:
                name, values = found.name, found.doubled()
        else:
            name, values = listed["name"], list(dict.fromkeys(map(_value, listed["values"].split(","))))
        if name in others or (searched is not None and name == searched.name and values):
            raise MemprofError(f"--search names {name} twice: give it one range, or list its values")
        if (place := _line_of(name)) is not None:
            with_number(*place, 1)  # else the first run would fail
        if values:
            others[name] = values
    return Search(searched, others)


def _value(text: str) -> Value:
    return int(text) if re.fullmatch("0|[1-9][0-9]*", text) else text


def parse_range(text: str) -> Range:
    """Parses `batch-size=1..4096`. Raises MemprofError for anything else, or an empty range."""
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
    """Parses --modes: `clipping=hooks,ghost`, or `hooks,ghost` for the argument `mode`. Returns argument and values."""
    name, equals, listed = text.partition("=")
    if not equals:
        name, listed = "mode", text
    modes = list(dict.fromkeys(mode.strip() for mode in listed.split(",") if mode.strip()))
    if not name.strip() or not modes:
        raise MemprofError(f"--modes {text!r} names no modes: write them as hooks,ghost or ARGUMENT=hooks,ghost")
    return name.strip(), modes


def parse_settings(text: str) -> list[str]:
    """Parses settings of torch's allocator: `expandable_segments:True,False` means two values of one setting.

    Commas in brackets belong to a value.

    Returns:
        All combinations of values, each in the form of PYTORCH_CUDA_ALLOC_CONF.

    Raises:
        MemprofError: a value has no key, or a key has no value.
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


def with_value(configuration: PlannedConfiguration, name: str, value: Value) -> PlannedConfiguration:
    """Returns the configuration with another value.

    Args:
        configuration: the configuration.
        name: `env:NAME` for an environment variable, `FILE:LINE` for the number in a line of the program, of its
            configuration or of a module that it imports, and an argument of the program otherwise.
        value: the value.
    """
    change: dict[str, Any] = {}
    if name.startswith(_VARIABLE):
        change = {"kind": "environment", "name": name.removeprefix(_VARIABLE), "value": str(value)}
    elif (place := _line_of(name)) is not None:
        change = {"kind": "line", "file": place[0], "line": place[1], "value": value}
    if change:
        return replace(configuration, changes=(*configuration.changes, change))
    program = configuration.program
    return replace(configuration, program=replace(program, arguments=with_argument(program.arguments, name, value)))


def _line_of(name: str) -> tuple[str, int] | None:
    file, _, line = name.rpartition(":")
    return (file, int(line)) if file and line.isdecimal() else None


def with_number(file: str, line: int, value: Value) -> str:
    """Returns the text of a file with another number in a line: the only one, or the first after the word batch.

    Raises:
        MemprofError: the file cannot be read, has no such line, or the line does not say which number is meant.
    """
    try:
        with open(file, encoding="utf-8", newline="") as content:
            lines = content.read().splitlines(keepends=True)
    except (OSError, UnicodeError) as error:
        raise MemprofError(f"--search {file}:{line}: {file} cannot be read ({error})") from None
    if not 1 <= line <= len(lines):
        raise MemprofError(f"--search {file}:{line}: {file} has {len(lines)} lines")
    text = lines[line - 1]
    numbers = list(_NUMBER.finditer(text))
    if len(numbers) > 1:
        word = _BATCH.search(text)
        numbers = [] if word is None else [each for each in numbers if each.start() >= word.end()][:1]
    if not numbers:
        raise MemprofError(
            f"--search {file}:{line} does not say which number is meant in {text.strip()!r}: name a line with one "
            "whole number, or with one after the word batch"
        )
    lines[line - 1] = f"{text[: numbers[0].start()]}{value}{text[numbers[0].end() :]}"
    return "".join(lines)


def places_of_batch(program: PlannedProgram) -> list[str]:
    """Returns what --search could name: `batch-size (line 2)`, `env:BATCH (line 3)`, `train.py:8 (BATCH = 64)`."""
    try:
        with open(program.target, encoding="utf-8") as content:
            source = content.read()
        nodes = list(ast.walk(ast.parse(source)))
    except (OSError, SyntaxError, ValueError):  # a module, or no Python
        return []
    found: dict[int, str] = {}
    for node in nodes:
        line = getattr(node, "lineno", 0)
        text = source.splitlines()[line - 1].strip() if line else ""
        match node:
            case ast.Constant(value=str(name)) if _FLAG.fullmatch(name):
                found[line] = f"{name.lstrip('-')} (line {line})"
            case ast.Constant(value=str(name)) if _BATCH.fullmatch(name) and _READS_VARIABLE.search(text):
                found[line] = f"env:{name} (line {line})"
            case ast.Constant(value=int(number)) if _names_batch(text, number):
                found.setdefault(line, f"{program.target}:{line} ({text if len(text) < _LONG else text[:_LONG] + '…'})")
    return [found[line] for line in sorted(found)]


def _names_batch(text: str, number: int) -> bool:
    return any(match["number"] == str(number) for match in _BATCH_NUMBER.finditer(text))


def with_argument(arguments: Sequence[str], name: str, value: object) -> tuple[str, ...]:
    """Returns the arguments with another value of one argument.

    Replaces `--name VALUE`, `--name=VALUE` or `name=VALUE` (also with `_` for `-`); appends `--name VALUE` if there is
    none. A name that begins with `-` is the flag itself.
    """
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
