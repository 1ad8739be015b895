# SPDX-License-Identifier: Apache-2.0
"""Runs code in the processes that multiprocessing starts anew (`spawn` and `forkserver`), before anything of theirs."""

from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

_PACKAGES = str(Path(__file__).parents[2])
# The beginning of the code that multiprocessing passes to `python -c`.
_CODE_PREFIXES = ("from multiprocessing.spawn import", "from multiprocessing.forkserver import")

_code: list[str] = []


def run_in_children(code: str) -> None:
    """Runs a line of Python in every process that multiprocessing starts from now on, after earlier calls' lines.

    No environment variable is used, so other programs that this process starts are as they are.
    """
    if not _code:
        _code.append(f"import sys; sys.path.append({_PACKAGES!r})")
        spawn = util.spawnv_passfds

        def spawn_with_code(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
            begin = "; ".join([*_code, ""])
            args = [begin + arg if isinstance(arg, str) and arg.startswith(_CODE_PREFIXES) else arg for arg in args]
            return spawn(path, args, passfds)

        vars(util)["spawnv_passfds"] = spawn_with_code
    _code.append(code)
