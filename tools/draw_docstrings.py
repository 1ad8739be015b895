# SPDX-License-Identifier: Apache-2.0
"""Prints docstrings of the package that are drawn at random, for somebody to read who did not write them.

`python tools/draw_docstrings.py SEED [NUMBER]`: 60 docstrings by default, each with its file, line and name. At least
57 of 60 should be understood at first reading.
"""

import ast
import random
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "opacus_memprof"


def docstrings() -> Iterator[str]:
    """Yields every docstring of the package, after the place and the name of what it documents."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    line = node.body[0].lineno
                    yield f"{file.relative_to(PACKAGE.parent)}:{line} {getattr(node, 'name', 'module')}\n{text}\n"


def main() -> None:
    """Prints the docstrings that the seed on the command line draws."""
    seed, number = (int(argument) for argument in [*sys.argv[1:], "60"][:2])
    print("\n".join(random.Random(seed).sample(list(docstrings()), number)))


if __name__ == "__main__":
    main()
