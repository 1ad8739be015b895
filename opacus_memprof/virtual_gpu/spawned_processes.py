# SPDX-License-Identifier: Apache-2.0
"""Passes virtual GPUs on to processes that multiprocessing spawns.

With the start methods `spawn` and `forkserver` they are new Python processes, which import torch when they unpickle
their arguments. The virtual GPU must start before that, so its start is prepended to the `python -c` code that
multiprocessing runs in them. No environment variable is used, so other programs get nothing.
"""

from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

_PACKAGES = str(Path(__file__).parents[2])
_CODE_PREFIXES = ("from multiprocessing.spawn import", "from multiprocessing.forkserver import")


def pass_to_children(kind: str, memory: int, count: int) -> None:
    """Makes processes that multiprocessing spawns from now on start with these virtual GPUs.

    Args:
        kind: a key of `GPUS`.
        memory: bytes of each GPU.
        count: the number of GPUs.
    """
    spawn = util.spawnv_passfds
    start_code = (
        f"import sys; sys.path.append({_PACKAGES!r}); from opacus_memprof import virtual_gpu; "
        f"virtual_gpu.start({kind!r}, memory={memory}, count={count}); "
    )

    def spawn_with_gpus(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
        args = [start_code + arg if isinstance(arg, str) and arg.startswith(_CODE_PREFIXES) else arg for arg in args]
        return spawn(path, args, passfds)

    vars(util)["spawnv_passfds"] = spawn_with_gpus
