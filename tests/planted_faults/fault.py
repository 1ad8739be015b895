# SPDX-License-Identifier: Apache-2.0
"""A fault that can be planted in the package."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


Texts = dict[str, list[tuple[str, str, str, str | tuple[str, ...]]]]
"""By file, in the package: for each fault what is wrong, ``before``, ``after``, and the test or tests that must fail.

A test is the name of a program of tests/exactness, or ``folder/file::test`` without ``tests/``, ``test_`` and ``.py``.
"""


@dataclass(frozen=True)
class Fault:
    """A fault, as the replacement of a text in a source file.

    Attributes:
        why: what is wrong then.
        path: the file, from the project's root.
        before: the text, which occurs once in the file.
        after: what replaces it.
        tests: the tests that must fail, as pytest takes them.
    """

    why: str
    path: str
    before: str
    after: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        """What is wrong, in lower case and with underscores: unique."""
        return re.sub(r"\W+", "_", self.why.lower()).strip("_")

    @property
    def needs_cuda(self) -> bool:
        """Whether the tests need a GPU."""
        return any(test.startswith("tests/gpu/") for test in self.tests)

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


def faults_of(texts: Texts) -> list[Fault]:
    """Returns the faults that are listed so."""
    return [
        Fault(
            why,
            f"opacus_memprof/{file}",
            before,
            after,
            tuple(map(_test, [tests] if isinstance(tests, str) else tests)),
        )
        for file, listed in texts.items()
        for why, before, after, tests in listed
    ]


def _test(short: str) -> str:
    file, _, test = short.partition("::")
    if "/" not in file:
        return f"tests/exactness/test_programs.py::test_outcome[{short}]"
    folder, _, name = file.rpartition("/")
    return f"tests/{folder}/test_{name}.py" + (f"::test_{test}" if test else "")
