# SPDX-License-Identifier: Apache-2.0
"""Profile directories with as many events as one likes, written quickly: one step's events, repeated with numpy."""

import json
import random
import struct
from pathlib import Path

import numpy as np
from event_files import CATEGORIES, START, TICK_NS, EventFile

TRAINING = ["setup", "forward", "backward", "clip", "noise", "optimizer_step", "zero_grad"]
TICKS = 10  # between events


def one_step(blocks: int, modules: list[str], seed: int = 0) -> EventFile:
    """`blocks` blocks of all categories, born over the phases of a step and all freed before it ends."""
    draw = random.Random(seed)
    file = EventFile()
    live: list[tuple[int, int, str, str]] = []
    for index in range(blocks):
        phase = TRAINING[1 + index * (len(TRAINING) - 1) // blocks]
        category, module = CATEGORIES[draw.randrange(len(CATEGORIES) - 2)], draw.choice(modules)
        size = draw.randrange(1, 2**18)
        file.add("alloc", 0x1000 * (index + 1), size, category, phase=phase, module=module, op="op")
        live.append((0x1000 * (index + 1), size, category, module))
        if draw.random() < 0.6:
            _free(file, live.pop(draw.randrange(len(live))), phase)
    for block in live:
        _free(file, block, "zero_grad")
    return file.add("step", size=1, step=1)


def _free(file: EventFile, block: tuple[int, int, str, str], phase: str) -> None:
    address, size, category, module = block
    file.add("free", address, size, category, phase=phase, module=module)


def write_repeated(file: EventFile, times: int, directory: Path) -> tuple[int, np.ndarray]:
    """Writes `file`'s step `times` times over, with one block of the middle repetition enlarged by 256 MiB.

    Returns:
        The number of events, and the live bytes after each of them.
    """
    step = np.frombuffer(b"".join(file.records), "<u8").reshape(-1, 4)
    count = len(step)
    words = np.tile(step, (times, 1))
    repetition = np.repeat(np.arange(times, dtype=np.uint64), count)
    words[:, 0] += repetition * np.uint64(TICKS * count)
    words[:, 3] += repetition << np.uint64(32)
    kind = words[:, 0] >> np.uint64(48) & np.uint64(255)
    words[kind == 4, 2] = repetition[kind == 4] + np.uint64(1)  # the logical step
    middle = times // 2 * count
    large = words[middle, 1] & np.uint64(2**48 - 1)
    of_middle = (repetition == times // 2) & (words[:, 1] & np.uint64(2**48 - 1) == large) & (kind <= 2)
    words[of_middle, 2] += np.uint64(256 * 2**20)
    ticks = TICKS * (len(words) + 1)
    header = struct.pack(
        "<8sII9Q", b"OMEMPROF", 2, 32, len(words), 0, 2**25, 4321, 1000, START, 1000 + ticks, START + TICK_NS * ticks, 1
    )
    (directory / "events.bin").write_bytes(header.ljust(4096, b"\0") + words.tobytes())
    meta = {"format": 1, "versions": {"torch": "2.15.0"}, "command": ["train.py"], "names": file.names()}
    (directory / "meta.json").write_text(json.dumps(meta))
    change = np.select([kind == 1, kind == 2], [1, -1]) * (words[:, 2] & np.uint64(2**48 - 1)).astype(np.int64)
    return len(words), np.cumsum(change)
