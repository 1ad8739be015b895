# SPDX-License-Identifier: Apache-2.0
"""Processes that multiprocessing spawns have the virtual GPUs of the one that spawns them.

They are new Python processes (of the start methods `spawn` and `forkserver`), which load torch when they unpickle what
they are given. The program text that multiprocessing starts them with is where the virtual GPU can come first; no
environment variable is involved, and other programs that are started get nothing.
"""

from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

_PACKAGES = str(Path(__file__).parents[2])
_STARTED = ("from multiprocessing.spawn import", "from multiprocessing.forkserver import")


def give_to_children(kind: str, memory: int, count: int) -> None:
    """Lets what multiprocessing spawns from now on start with these virtual GPUs."""
    spawn = util.spawnv_passfds
    start = (
        f"import sys; sys.path.append({_PACKAGES!r}); from opacus_memprof import virtual_gpu; "
        f"virtual_gpu.start({kind!r}, memory={memory}, count={count}); "
    )

    def spawn_with_gpus(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
        given = [start + text if isinstance(text, str) and text.startswith(_STARTED) else text for text in args]
        return spawn(path, given, passfds)

    vars(util)["spawnv_passfds"] = spawn_with_gpus
