# SPDX-License-Identifier: Apache-2.0
"""Writes profile directories by hand, from docs/format.md alone: none of the profiler's code is used."""

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CATEGORIES = [
    "unattributed",
    "model_parameters",
    "buffers",
    "gradients",
    "optimizer_states",
    "activations",
    "activation_hooks_shared",
    "activation_hooks_opacus_only",
    "per_sample_gradients",
    "norm_samples",
    "temp_matrices",
    "clipping_temporaries",
    "summed_gradients",
    "noise",
    "backprop_copies",
    "forward_temporaries",
    "backward_temporaries",
    "optimizer_temporaries",
    "communication",
    "library_workspace",
    "inputs",
    "pending_free",
    "forward_undecided",
]
PHASES = [
    "idle",
    "setup",
    "forward",
    "backward",
    "second_backward",
    "clip",
    "noise",
    "optimizer_step",
    "zero_grad",
]
KINDS = {"alloc": 1, "free": 2, "retag": 3, "step": 4, "phase": 5, "snapshot": 6, "seed": 7, "oom": 8}
START = 1_700_000_000_000_000_000
TICK_NS = 4


@dataclass
class EventFile:
    """The events of one profile, in order; names are interned as they come. `device` is 0 for the CPU, 1 for cuda:0."""

    records: list[bytes] = field(default_factory=list)
    categories: list[str] = field(default_factory=lambda: list(CATEGORIES))
    modules: list[str] = field(default_factory=lambda: [""])
    ops: list[str] = field(default_factory=lambda: [""])
    dropped: int = 0
    closed: bool = True

    def add(
        self,
        kind: str,
        address: int = 0,
        size: int = 0,
        category: str = "unattributed",
        *,
        phase: str = "idle",
        step: int = 0,
        device: int = 1,
        module: str = "",
        op: str | int = "",
    ) -> "EventFile":
        """One event. `op` is a name, or a number where the event's kind gives it another meaning."""
        time = 10 * (len(self.records) + 1)
        words = (
            time | KINDS[kind] << 48 | _id(self.categories, category) << 56,
            address | PHASES.index(phase) << 48 | device << 56,
            size,
            _id(self.modules, module) | (op if isinstance(op, int) else _id(self.ops, op)) << 16 | step << 32,
        )
        self.records.append(struct.pack("<4Q", *words))
        return self

    def retag(self, address: int, before: str, after: str, **where: Any) -> "EventFile":
        return self.add("retag", address, category=after, op=_id(self.categories, before), **where)

    def content(self) -> bytes:
        header = struct.pack(
            "<8sII9Q",
            b"OMEMPROF",
            2,
            32,
            len(self.records) + self.dropped,
            self.dropped,
            2**20,
            4321,
            1000,
            START,
            1000 + 10**6,
            START + TICK_NS * 10**6,
            self.closed,
        )
        return header.ljust(4096, b"\0") + b"".join(self.records)

    def names(self) -> dict[str, list[str]]:
        return {
            "categories": self.categories,
            "phases": PHASES,
            "modules": self.modules,
            "ops": self.ops,
            "threads": ["main"],
            "streams": [""],
            "devices": ["cpu", "cuda:0", "cuda:1"],
        }

    def write(self, directory: Path, *, meta: bool = True) -> Path:
        """Writes events.bin and meta.json; returns the directory."""
        (directory / "events.bin").write_bytes(self.content())
        if meta:
            content = {"format": 1, "versions": {"torch": "2.15.0"}, "command": ["train.py"], "names": self.names()}
            (directory / "meta.json").write_text(json.dumps(content))
        return directory


def unix_ns(event: int) -> int:
    """When an event of an EventFile was, by its index."""
    return START + TICK_NS * 10 * (event + 1)


def _id(names: list[str], name: str) -> int:
    if name not in names:
        names.append(name)
    return names.index(name)
