# SPDX-License-Identifier: Apache-2.0
"""Draws faults that nobody has thought of: ``python -m tests.planted_faults.mutants --count 60 clipping analysis/oom``.

Each is a change of one expression or statement. Its tests are those that execute its line, the quickest first: of the
test files that import the module over the fewest imports, which run once without a fault; and those of the listed
faults of the same file. Prints a row of a table for each fault, and fails if any survives.
"""

import argparse
import ast
import copy
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.planted_faults import FAULTS
from tests.planted_faults.__main__ import copy_sources, run_tests, run_with
from tests.planted_faults.fault import ROOT

_REPLACED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip
_LONGEST = 300  # seconds
_LONGEST_TRACED = 1200
_MOST_TESTS = 40  # that execute a line
_SURVIVED = "**survived**"
_UNREACHED = 1000
_TEST_FOLDERS = ("unit", "exactness", "plugin", "integration")
_passes: set[str] = set()  # tests, without a fault
_fails_anyway: set[str] = set()


@dataclass(frozen=True)
class Mutant:
    """A change of a source file.

    Attributes:
        file: the file, relative to the package.
        line: the first changed line.
        before: the changed text.
        after: what replaces it.
        source: the whole file with the change.
    """

    file: str
    line: int
    before: str
    after: str
    source: str

    def row(self) -> str:
        """Returns the first cells of its row."""
        before, after = (" ".join(text.split()).replace("|", "\\|") for text in (self.before, self.after))
        return f"| {self.file}:{self.line} | `{before[:70]}` | `{after[:70]}` |"


def mutants_of(file: str) -> Iterator[Mutant]:
    """Yields every change of a file, given relative to the package."""
    source = (ROOT / "opacus_memprof" / file).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(source)
    ignored = {id(inner) for node in ast.walk(tree) for part in _not_executed(node) for inner in ast.walk(part)}
    for node in ast.walk(tree):
        for changed, after in _changes(node) if id(node) not in ignored else ():
            start = starts[changed.lineno - 1] + changed.col_offset
            end = starts[changed.end_lineno - 1] + changed.end_col_offset
            planted = source[:start] + after.encode() + source[end:]
            yield Mutant(file, changed.lineno, source[start:end].decode(), after, planted.decode())


def _not_executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yields annotations, what only type checkers read, and f-strings, whose parts have no place before Python 3.12."""
    for name in ("annotation", "returns"):
        if (part := getattr(node, name, None)) is not None:
            yield part
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
        yield node


def _changes(node: Any) -> Iterator[tuple[Any, str]]:
    """Yields the nodes that change and what replaces them."""
    match node:
        case ast.Compare(ops=[operator, *_]):
            yield node, _with(node, lambda new: new.ops.__setitem__(0, _REPLACED[type(operator)]()))
        case ast.BoolOp(op=operator) | ast.BinOp(op=operator) if type(operator) in _REPLACED:
            yield node, _with(node, lambda new: setattr(new, "op", _REPLACED[type(operator)]()))
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node, repr(value + 1 if isinstance(value, int) else value * 2)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield test, _with(ast.UnaryOp(ast.Not(), test))
        case ast.Call(args=arguments, keywords=keywords) if len(arguments) + len(keywords) > 1:
            yield node, _with(node, lambda new: (new.keywords or new.args).pop())
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.AugAssign():
            yield node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "pass"
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            yield node, "return None"
        case ast.ExceptHandler(type=kind) if kind is not None:
            yield kind, "BaseException"


def _with(node: ast.AST, change: Callable[[Any], object] = lambda new: None) -> str:
    """Returns an expression's text after a change, in brackets."""
    changed = copy.deepcopy(node)
    change(changed)
    return f"({ast.unparse(changed)})"


@cache
def _imports(file: Path) -> frozenset[Path]:
    """Returns the files of the project that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            path = ROOT / name.replace(".", "/")
            found |= {each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()}
    return frozenset(found)


def tests_of(file: str, count: int) -> tuple[str, ...]:
    """Returns tests of a file.

    Args:
        file: relative to the package.
        count: how many test files, beside the tests of listed faults: those that import the file, first those whose
            names share a word with the file or, failing that, with its folders.

    Returns:
        the tests, as pytest takes them.
    """
    listed = [test for fault in FAULTS if fault.path == f"opacus_memprof/{file}" for test in fault.tests]
    target = ROOT / "opacus_memprof" / file
    words = [set(re.split("_", part)) for part in target.relative_to(ROOT / "opacus_memprof").with_suffix("").parts]

    def rank(test: Path) -> tuple[bool, int, int, bool, int]:
        own = [word for word in test.stem.split("_") if len(word) > 2]
        shared = [n for n, part in enumerate(words) for word in part if any(word.startswith(each) for each in own)]
        distance = _distance(test, target)
        return (
            distance == _UNREACHED,
            -max(shared, default=-1),
            distance,
            test.parent.name != "unit",
            test.stat().st_size,
        )

    tests = [test for folder in _TEST_FOLDERS for test in (ROOT / "tests" / folder).glob("test_*.py")]
    return *dict.fromkeys(listed), *(str(test.relative_to(ROOT)) for test in sorted(tests, key=rank)[:count])


def _distance(start: Path, target: Path) -> int:
    """Returns the number of imports from one file to the other, or _UNREACHED."""
    reached, edge, steps = {start}, {start}, 0
    while edge and target not in reached:
        edge = {each for file in edge for each in _imports(file)} - reached
        reached |= edge
        steps += 1
    return steps if target in reached else _UNREACHED


class _Lines:
    """A plugin of pytest that notes which lines of a file each test executes in this process.

    Args:
        source: the file.
        output: where a line of JSON for each test comes: its seconds, its name and the lines.
    """

    def __init__(self, source: Path, output: Path) -> None:
        self._source, self._output = str(source), output

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Traces a test with its fixtures."""
        lines: set[int] = set()

        def in_file(frame: Any, event: str, arg: object) -> object:
            lines.add(frame.f_lineno)
            return in_file

        def trace(frame: Any, event: str, arg: object) -> object:
            return in_file(frame, event, arg) if frame.f_code.co_filename == self._source else None

        start = time.perf_counter()
        sys.settrace(trace)
        threading.settrace(trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            with self._output.open("a") as file:
                file.write(json.dumps([time.perf_counter() - start, item.nodeid, sorted(lines)]) + "\n")


def covering(tree: Path, file: str, tests: Iterable[str]) -> dict[int, list[str]]:
    """Runs tests without a fault. Returns those that execute each line of a file, the quickest first."""
    output = tree / "lines.jsonl"
    output.unlink(missing_ok=True)
    run_tests(tree, tests, _LONGEST_TRACED, [_Lines(tree / "opacus_memprof" / file, output)])
    found: dict[int, list[str]] = {}
    for _, test, lines in sorted(map(json.loads, output.read_text().splitlines())) if output.exists() else ():
        for line in lines:
            found.setdefault(line, []).append(test)
    return found


def main() -> int:
    """Draws faults and plants them. Returns 0 if all of them are caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", help="folders or files of the package, such as clipping/kernels")
    parser.add_argument("--count", type=int, default=60, help="how many faults")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--files", type=int, default=4, help="test files for each, beside the tests of listed faults")
    parser.add_argument(
        "--table", type=Path, help="a file that gets the table, too: rows that it has are not drawn again"
    )
    parser.add_argument("--only", type=int, nargs="+", help="of the draw, plant those with these numbers")
    arguments = parser.parse_args()
    paths = [ROOT / "opacus_memprof" / folder for folder in arguments.folders]
    files = sorted({file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])})
    names = [str(file.relative_to(ROOT / "opacus_memprof")) for file in files]
    everything = [mutant for name in names for mutant in mutants_of(name)]
    begin = time.perf_counter()
    drawn = random.Random(arguments.seed).sample(everything, min(arguments.count, len(everything)))
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    title = f"{len(drawn)} of {len(everything)} changes, seed {arguments.seed}, at {commit}"
    table = arguments.table.read_text() if arguments.table and arguments.table.exists() else ""
    if table and table.partition("\n")[0] != title:
        parser.error(f"{arguments.table} is of another draw: {table.partition(chr(10))[0]}")

    def write(text: str) -> None:
        nonlocal table
        table += f"{text}\n"
        print(text, flush=True)
        if arguments.table:
            arguments.table.write_text(table)

    if not table:
        write(f"{title}\n\n| | place | before | after | outcome | s |\n|---|---|---|---|---|---|")
    known = set(map(int, re.findall(r"^\| (\d+) \|", table, re.MULTILINE)))
    numbers = sorted(set(arguments.only or range(len(drawn))) - known, key=lambda number: (drawn[number].file, number))
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_sources(tree)
        for file, same in groupby(numbers, key=lambda number: drawn[number].file):
            near = tests_of(file, arguments.files)
            lines = covering(tree, file, near)
            for number in same:
                mutant, start = drawn[number], time.perf_counter()
                tests = lines.get(mutant.line, [])[:_MOST_TESTS]
                outcome = _outcome(tree, mutant, [*tests, *(test for test in near if not tests or "::" in test)])
                write(f"| {number} {mutant.row()} {outcome} | {time.perf_counter() - start:.0f} |")
    survivors = table.count(f" {_SURVIVED} |")
    print(f"\n{survivors} of {len(drawn)} survived; {time.perf_counter() - begin:.0f} s")
    return int(survivors > 0)


def _outcome(tree: Path, mutant: Mutant, tests: Iterable[str]) -> str:
    """Plants a fault and runs tests; a test that fails without it does not count."""
    name = f"opacus_memprof/{mutant.file}"
    original = (tree / name).read_text()
    while True:
        chosen = [test for test in tests if test not in _fails_anyway]
        without = [f"--deselect={test}" for test in _fails_anyway]
        done = run_with(tree, name, mutant.source, [*chosen, *without], _LONGEST)
        failure = done.first_failure()
        if done.status in (0, -1) or failure in _passes:
            break
        if failure and run_with(tree, name, original, [failure], _LONGEST).status:
            _fails_anyway.add(failure)
        else:
            _passes.add(failure)
            break
    return {0: _SURVIVED, -1: "did not end"}.get(done.status, failure.rpartition("::")[2] or "no test can run")


if __name__ == "__main__":
    sys.exit(main())
