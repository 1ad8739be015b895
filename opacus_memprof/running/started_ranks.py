# SPDX-License-Identifier: Apache-2.0
"""Programs that start their ranks themselves, by torch.multiprocessing.spawn or a Process of the start method `spawn`.

A process that multiprocessing starts becomes a rank when it calls init_process_group. From then on it records a profile
of its own, in `rank_0`, `rank_1` … of the program's directory. Other children, such as workers of a DataLoader, record
nothing. Nor does a forked process, because the profiler's locks belong to its parent.
"""

import functools
import inspect
import os
import sys
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from opacus_memprof.language import tr
from opacus_memprof.recording.startup import AfterImport, run_in_children


def record_started_ranks(directory: Path, device: str, max_events: int) -> None:
    """Makes the ranks that this process starts from now on record profiles in `directory`."""
    run_in_children(
        "from opacus_memprof.running import recording; "
        f"recording.record_if_rank({str(directory)!r}, {device!r}, {max_events})"
    )
    pid = os.getpid()

    def note_fork(_: Mapping[str, Any]) -> None:
        if os.getpid() != pid:
            forked = tr(
                "this rank was forked, and is not recorded: start ranks by the start method spawn, or by torchrun"
            )
            print(f"opacus-memprof: {forked}", file=sys.__stderr__)

    before_init_process_group(note_fork)


def before_init_process_group(callback: Callable[[Mapping[str, Any]], None]) -> None:
    """Calls the callback with the arguments of each call of init_process_group, before it."""

    def patch() -> None:
        from torch import distributed

        if not distributed.is_available():
            return
        c10d = distributed.distributed_c10d
        initialize = c10d.init_process_group
        signature = inspect.signature(initialize)

        @functools.wraps(initialize)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            callback(signature.bind(*args, **kwargs).arguments)
            initialize(*args, **kwargs)

        for module in (c10d, distributed):
            vars(module)["init_process_group"] = init_process_group

    AfterImport("torch.distributed", patch)


def variables(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Returns the rank and the number of ranks that init_process_group is given, as a launcher's variables."""
    query = dict(urllib.parse.parse_qsl(urllib.parse.urlparse(arguments.get("init_method") or "").query))
    given = {name: arguments.get(name, -1) for name in ("rank", "world_size")}
    found = {name: query.get(name, value) if value in (-1, None) else value for name, value in given.items()}
    return {name.upper(): str(value) for name, value in found.items() if value not in (-1, None)}
