# SPDX-License-Identifier: Apache-2.0
"""The program of a plan of a function: `python -m opacus_memprof.planning.call FILE [VALUE]`.

Calls the function that `pack` has written to the file.
"""

import io
import multiprocessing.process
import multiprocessing.spawn
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opacus_memprof.errors import MemprofError


def pack(function: Callable[..., object]) -> bytes:
    """Serializes a function by its name, with what another process needs to find it, like multiprocessing's spawn.

    Raises:
        MemprofError: another process cannot find it, or this process is itself importing its main module for a plan.
    """
    name = getattr(function, "__qualname__", repr(function))
    try:
        preparation = multiprocessing.spawn.get_preparation_data("plan")
    except RuntimeError:
        raise MemprofError(
            "a plan is made where it would make itself again, for the planned function's process imports the script: "
            'make it below `if __name__ == "__main__":`'
        ) from None
    preparation.pop("authkey")  # of pipes between the two, of which there are none; it must not be written to a file
    if getattr(function, "__module__", None) == "__main__" and not preparation.keys() & {
        "init_main_from_path",
        "init_main_from_name",
    }:
        raise MemprofError(
            f"{name} was defined in an interactive session, where no other process finds it: put it into a module"
        )
    content = io.BytesIO()
    try:
        pickle.dump(preparation, content)
        pickle.dump(function, content)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise MemprofError(
            f"{name} cannot be run in a process of its own ({error}): define it with def at the top level of a module"
        ) from None
    return content.getvalue()


def _call(file: Path, values: list[str]) -> None:
    with open(file, "rb") as content:
        # A main module that is not guarded shall not make the same plan again: see `pack`.
        process: Any = multiprocessing.process.current_process()
        process._inheriting = True
        try:
            multiprocessing.spawn.prepare(pickle.load(content))
            function = pickle.load(content)
        finally:
            del process._inheriting
    function(*map(int, values))


if __name__ == "__main__":
    _call(Path(sys.argv[1]), sys.argv[2:])
