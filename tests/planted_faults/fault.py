# SPDX-License-Identifier: Apache-2.0
"""A fault that can be planted in the package."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fault:
    """A fault, as the replacement of a text in a source file.

    Attributes:
        name: unique.
        file: the file, in the folder ``room`` of the package.
        before: the text, which occurs once in the file.
        after: what replaces it.
        why: what is wrong then.
        tests: the tests that must fail, as pytest takes them.
        needs_cuda: whether they need a GPU.
        room: the folder; "." is the package itself.
    """

    name: str
    file: str
    before: str
    after: str
    why: str
    tests: tuple[str, ...]
    needs_cuda: bool = False
    room: str = "clipping"

    @property
    def path(self) -> str:
        """The file, from the project's root."""
        return Path("opacus_memprof", self.room, self.file).as_posix()

    def source(self) -> str:
        """Returns the file without the fault."""
        return (ROOT / self.path).read_text()

    def planted(self) -> str:
        """Returns the file with the fault.

        Raises:
            ValueError: the text does not occur once.
        """
        source = self.source()
        count = source.count(self.before)
        if count != 1:
            raise ValueError(f"{self.name}: {self.before!r} occurs {count} times in {self.path}")
        return source.replace(self.before, self.after)


def programs(*names: str) -> tuple[str, ...]:
    """Returns the tests of programs of tests/exactness."""
    return tuple(f"tests/exactness/test_programs.py::test_outcome[{name}]" for name in names)


def integration(*tests: str) -> tuple[str, ...]:
    """Returns tests in tests/integration, given as ``file::test`` without ``test_`` and ``.py``."""
    return _in("tests/integration", tests)


def unit(*tests: str) -> tuple[str, ...]:
    """Returns tests in tests/unit, given as ``file::test`` without ``test_`` and ``.py``."""
    return _in("tests/unit", tests)


def plugin(*tests: str) -> tuple[str, ...]:
    """Returns tests in tests/plugin, given as ``file::test`` without ``test_`` and ``.py``."""
    return _in("tests/plugin", tests)


def _in(folder: str, tests: tuple[str, ...]) -> tuple[str, ...]:
    files = [(file, test) for file, _, test in (each.partition("::") for each in tests)]
    return tuple(f"{folder}/test_{file}.py" + (f"::test_{test}" if test else "") for file, test in files)
