# SPDX-License-Identifier: Apache-2.0
"""A profile of random events, and what was live at each of them, told by numpy from docs/format.md's reader alone."""

import random
from pathlib import Path

import numpy as np
from event_files import EventFile
from test_analysis_format import documented_reader

from opacus_memprof.analysis.profile import build_profile, write_profile

# None of these changes its meaning by how a block's life goes on.
SETTLED = (
    "model_parameters",
    "gradients",
    "noise",
    "inputs",
    "per_sample_gradients",
    "teacher",
    "activation_hooks_shared",
)
PHASES = ("setup", "forward", "backward", "clip", "noise", "optimizer_step")


def write_random_profile(directory: Path, events: int, seed: int = 0) -> Path:
    """Two GPUs; steps, phases, snapshots, retags and failed allocations among the blocks."""
    draw = random.Random(seed)
    file = EventFile()
    live: dict[tuple[int, int], tuple[int, str, str]] = {}
    step, phase = 0, "setup"
    for number in range(events):
        kind = draw.choices(("alloc", "free", "retag", "phase", "step", "snapshot", "oom"), (50, 42, 10, 4, 1, 1, 1))[0]
        where = {"phase": phase, "step": step}
        if kind == "alloc" or (not live and kind in ("free", "retag")):
            device, address = draw.choice((1, 1, 2)), 2**23 * draw.randrange(1, 999)
            if (device, address) in live:
                continue
            block = draw.randrange(1, 2**23), draw.choice(SETTLED), f"blocks.{draw.randrange(5)}.fc_{draw.randrange(3)}"
            live[device, address] = block
            file.add(
                "alloc", address, block[0], block[1], device=device, module=block[2], op=f"op{number % 9}", **where
            )
        elif kind == "free":
            device, address = draw.choice(list(live))
            size, category, module = live.pop((device, address))
            file.add("free", address, size, category, device=device, module=module, **where)
        elif kind == "retag":
            device, address = draw.choice(list(live))
            size, before, module = live[device, address]
            after = draw.choice(SETTLED)
            live[device, address] = size, after, module
            file.retag(address, before, after, size=size, device=device, module=module, **where)
        elif kind == "phase":
            phase = draw.choice(PHASES)
            file.add("phase", phase=phase, step=step, device=0)
        elif kind == "step":
            step += 1
            file.add("step", size=step, step=step, device=0)
        elif kind == "snapshot":
            file.add("snapshot", size=number, op="now", device=0, **where)
        else:
            file.add("oom", size=2**40, category="noise", device=1, **where)
    file.write(directory)
    write_profile(build_profile(directory, status="finished", exit_code=0), directory)
    return directory


class Oracle:
    """`live[i, c]`: bytes of category id `c` after event `i` of a device; 0 where the device has not begun."""

    def __init__(self, directory: Path, device: int) -> None:
        self.events, self.names = documented_reader()["read_events"](directory)
        here = self.events["device"] == device
        kind, size, category = (self.events[key].astype(np.int64) for key in ("kind", "size", "category"))
        self.blocks = here & np.isin(kind, (1, 2, 7))
        self.live = np.zeros((len(kind), len(self.names["categories"])), np.int64)
        rows = np.arange(len(kind))
        for kinds, column, sign in (((1, 7, 3), category, 1), ((2,), category, -1), ((3,), self.events["op"], -1)):
            chosen = here & np.isin(kind, kinds)
            np.add.at(self.live, (rows[chosen], column[chosen].astype(np.int64)), sign * size[chosen])
        self.live = self.live.cumsum(axis=0)
        self.total = self.live.sum(axis=1)

    def settled_at(self, event: int) -> dict[str, int]:
        """By public name, just before the device's next block comes or goes."""
        later = np.flatnonzero(self.blocks[event + 1 :])
        row = self.live[event + later[0] if len(later) else -1]
        return self.named(row)

    def named(self, row: np.ndarray) -> dict[str, int]:
        named: dict[str, int] = {}
        for name, size in zip(self.names["categories"], row.tolist(), strict=True):
            public = "activation_hooks" if name.startswith("activation_hooks") else name
            if size:
                named[public] = named.get(public, 0) + size
        return named
