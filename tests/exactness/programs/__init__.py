# SPDX-License-Identifier: Apache-2.0
"""The programs, by name."""

import importlib
import pkgutil

from tests.exactness.program import Program


def _all() -> dict[str, Program]:
    found: dict[str, Program] = {}
    for file in pkgutil.iter_modules(__path__):
        for program in importlib.import_module(f"{__name__}.{file.name}").PROGRAMS:
            assert program.name not in found, f"two programs are called {program.name}"
            found[program.name] = program
    return found


PROGRAMS = _all()
