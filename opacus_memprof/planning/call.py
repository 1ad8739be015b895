# SPDX-License-Identifier: Apache-2.0
"""The program for planning a function: `python -m opacus_memprof.planning.call FILE [VALUE]`.

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
    """Serializes a function by its name, with the data to find it in another process, like multiprocessing's spawn.

    Raises:
        MemprofError: another process cannot find it, or this process is importing its main module for a plan.
    """
    name = getattr(function, "__qualname__", repr(function))
    try:
        preparation = multiprocessing.spawn.get_preparation_data("plan")
    except RuntimeError:
        raise MemprofError(
            "this plan would start itself again, because the planned function's process imports the script: "
            'make it below `if __name__ == "__main__":`'
        ) from None
    preparation.pop("authkey")  # for pipes, which are not used; it must not be written to a file
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
        # A main module without the guard must not make the same plan again: see `pack`.
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
