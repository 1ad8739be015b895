# SPDX-License-Identifier: Apache-2.0
"""The core behaves as a plain model of it.

Runs random allocations, frees, resizes, tags, phases, retags, captures, steps, snapshots and peaks on two threads, and
compares every block, counter and event.
"""

from __future__ import annotations

import gc
import struct
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from opacus_memprof.recording import native

CATEGORIES = ("unattributed", "forward_undecided", "temp_matrices", "per_sample_gradients", "state_machine")
PHASES = ("idle", "setup", "forward", "clip", "noise", "optimizer_step", "zero_grad")
DEFAULT_CATEGORY = {
    "forward": "forward_undecided",
    "clip": "clipping_temporaries",
    "noise": "noise",
    "optimizer_step": "optimizer_temporaries",
}
MODULES = ("a", "a.b")
ANY_MODULE = st.sampled_from(MODULES)
ANY_CATEGORY = st.sampled_from(CATEGORIES)
EITHER_THREAD = st.sampled_from((0, 1))
ALLOC, FREE, RETAG, SNAPSHOT, SEED = 1, 2, 3, 6, 7  # kinds of events
HEADER = 4096


@dataclass(eq=False)
class Block:
    """A live storage of the program's, and what the ledger should say of it."""

    address: int
    size: int
    base: str  # its category when no capture holds it
    category: str
    phase: str
    module: str
    op: str
    step: int
    captures: int = 0


@dataclass(eq=False)
class Storage:
    """What the program holds: its own tensor, and one for each capture that Opacus would hold."""

    tensors: list[torch.Tensor]
    block: Block | None  # None without bytes


@dataclass
class Thread:
    phase: str = "idle"
    tags: list[tuple[dict[str, str], Any]] = field(default_factory=list)

    def tag(self, name: str) -> str | None:
        """The innermost tag that says something of this field."""
        return next((fields[name] for fields, _ in reversed(self.tags) if name in fields), None)


class Core(RuleBasedStateMachine):
    storages = Bundle("storages")

    def __init__(self) -> None:
        super().__init__()
        gc.disable()  # other tests' garbage stays where it is
        self.worker = ThreadPoolExecutor(1)
        self.threads = (Thread(), Thread())
        self.captures: dict[str, list[list[tuple[Storage, torch.Tensor, Block | None]]]] = {m: [] for m in MODULES}
        self.blocks: list[Block] = []
        self.snapshots: dict[int, Counter[str]] = {}
        self.directory = tempfile.TemporaryDirectory()
        self.was_installed = native.cpu_installed()
        native.cpu_install()
        self.foreign = {block["address"] for block in native.live_blocks()}
        self.counts = Counter[str]()
        for block in native.live_blocks():
            self.counts[block["category"]] += block["bytes"]
        self.reported = native.cpu_reported_bytes() - self.counts.total()  # from before the profiler
        for index in (0, 1):
            self.on(index, lambda: native.set_phase(native.phase_id("idle")))
        native.start_events(self.directory.name, 1 << 16, "{}")
        self.physical, self.logical = native.step()
        self.reset_peaks()

    def teardown(self) -> None:
        try:
            for index, thread in enumerate(self.threads):
                while thread.tags:
                    self.leave_tag(index)
                self.set_phase(index, "idle")
            for module, stack in self.captures.items():
                while stack:
                    self.release(module)
            self.snapshot()
            native.stop_events()
            self.replay()
        finally:
            native.stop_events()
            if not self.was_installed:
                native.cpu_uninstall()
            self.worker.shutdown()
            self.directory.cleanup()
            gc.enable()

    def on(self, index: int, function: Callable[[], Any]) -> Any:
        """Runs on the main thread (0) or on the worker (1)."""
        return function() if index == 0 else self.worker.submit(function).result()

    # --- the model's counters ---

    def born(self, index: int, address: int, size: int) -> Block | None:
        if size == 0:
            return None
        thread = self.threads[index]
        phase = thread.tag("phase") or thread.phase
        category = thread.tag("category") or DEFAULT_CATEGORY.get(phase, "unattributed")
        module, op = thread.tag("module") or "", thread.tag("op") or ""
        block = Block(address, size, category, category, phase, module, op, self.physical)
        self.blocks.append(block)
        self.counts[category] += block.size
        if self.counts.total() > self.highest:
            self.highest, self.peak_is_open = self.counts.total(), True
            self.peak_step, self.peak_phase = self.physical, phase
        return block

    def died(self, block: Block | None) -> None:
        if block is not None:
            self.close_peak()
            self.blocks.remove(block)
            self.counts[block.category] -= block.size

    def becomes(self, block: Block, category: str) -> None:
        self.counts[block.category] -= block.size
        self.counts[category] += block.size
        block.category = category

    def close_peak(self) -> None:
        """The peak's categories are those of the last moment before a free ends it."""
        if self.peak_is_open:
            self.peak_counts, self.peak_is_open = +self.counts, False

    # --- the program ---

    @rule(target=storages, index=EITHER_THREAD, size=st.integers(0, 3000))
    def allocate(self, index: int, size: int) -> Storage:
        tensor = self.on(index, lambda: torch.empty(size, dtype=torch.uint8))
        return Storage([tensor], self.born(index, tensor.data_ptr(), size))

    @rule(storage=consumes(storages), index=EITHER_THREAD)
    def drop(self, storage: Storage, index: int) -> None:
        """The program's own tensor goes; the storage with it, unless a capture holds it."""
        self.on(index, lambda: storage.tensors.__delitem__(0))
        if not storage.tensors:
            self.died(storage.block)

    @rule(storage=storages, more=st.integers(1, 3000), index=EITHER_THREAD)
    def grow(self, storage: Storage, more: int, index: int) -> None:
        """A new block under the same storage, then the old one's free. Captures knew only the old one."""
        tensor, old = storage.tensors[0], storage.block
        size = more + (0 if old is None else old.size)
        self.on(index, lambda: tensor.resize_(size).data_ptr())
        storage.block = self.born(index, tensor.data_ptr(), size)
        self.died(old)

    @rule(
        index=EITHER_THREAD,
        fields=st.fixed_dictionaries(
            {},
            optional={
                "category": ANY_CATEGORY,
                "phase": st.sampled_from(PHASES),
                "module": ANY_MODULE,
                "op": st.sampled_from(("op", "other_op")),
            },
        ),
    )
    def enter_tag(self, index: int, fields: dict[str, str]) -> None:
        tag = native.Tag(**{name: getattr(native, f"{name}_id")(value) for name, value in fields.items()})
        self.on(index, tag.__enter__)
        self.threads[index].tags.append((fields, tag))

    @rule(index=EITHER_THREAD)
    def leave_tag(self, index: int) -> None:
        if self.threads[index].tags:
            _, tag = self.threads[index].tags.pop()
            self.on(index, lambda: tag.__exit__(None, None, None))

    @rule(index=EITHER_THREAD, phase=st.sampled_from(PHASES))
    def set_phase(self, index: int, phase: str) -> None:
        before = self.on(index, lambda: native.set_phase(native.phase_id(phase)))
        assert before == native.phase_id(self.threads[index].phase)
        self.threads[index].phase = phase

    # --- the hooks ---

    @rule(storage=storages, category=ANY_CATEGORY, module=st.none() | ANY_MODULE)
    def retag(self, storage: Storage, category: str, module: str | None) -> None:
        self.expect_retag(storage, category, module, lambda tensors, *args: native.retag(tensors, *args))

    @rule(storage=storages, expected=st.sets(ANY_CATEGORY), category=ANY_CATEGORY, module=st.none() | ANY_MODULE)
    def retag_if(self, storage: Storage, expected: set[str], category: str, module: str | None) -> None:
        ids = [native.category_id(name) for name in expected]
        fitting = storage.block is not None and storage.block.base in expected
        self.expect_retag(storage, category, module, lambda t, *args: native.retag_if(t, ids, *args), fitting)

    def expect_retag(
        self, storage: Storage, category: str, module: str | None, retag: Callable[..., int], fitting: bool = True
    ) -> None:
        module_id = None if module is None else native.module_id(module)
        changed = retag([storage.tensors[0][:1]], native.category_id(category), module_id)
        block = storage.block
        if block is None or not fitting:
            assert changed == 0
            return
        same = block.base == category and module in (None, block.module)
        assert changed == (0 if same else block.size)
        block.base, block.module = category, module or block.module
        if block.captures == 0:
            self.becomes(block, category)

    @rule(module=ANY_MODULE, chosen=st.lists(storages, max_size=3))
    def capture(self, module: str, chosen: list[Storage]) -> None:
        """Captures detached views, as Opacus does. The core counts views whose block was allocated in forward."""
        views = [storage.tensors[0].detach() for storage in chosen]
        native.capture(native.module_id(module), views)
        record = []
        for storage, view in zip(chosen, views, strict=True):
            storage.tensors.append(view)
            counted = storage.block if storage.block is not None and storage.block.base == "forward_undecided" else None
            if counted is not None:
                counted.captures += 1
                if counted.captures == 1:
                    self.becomes(counted, "activation_hooks_shared")
            record.append((storage, view, counted))
        self.captures[module].append(record)

    @rule(target=storages, module=ANY_MODULE, size=st.integers(1, 3000), kept=st.booleans())
    def forward(self, module: str, size: int, kept: bool) -> Any:
        """A module's input is born in forward and captured; the program (or autograd) keeps it or does not."""
        self.enter_tag(0, {"category": "forward_undecided", "module": module})
        storage = self.allocate(0, size)
        self.leave_tag(0)
        self.capture(module, [storage])
        if kept:
            return storage
        self.drop(storage, 0)
        return multiple()

    @rule(module=ANY_MODULE)
    def release(self, module: str) -> None:
        if not self.captures[module]:
            return
        native.release(native.module_id(module))
        for storage, view, counted in self.captures[module].pop():
            if counted in self.blocks:
                counted.captures -= 1
                if counted.captures == 0:
                    self.becomes(counted, counted.base)
            storage.tensors = [t for t in storage.tensors if t is not view]
            del view
            if not storage.tensors:
                self.died(storage.block)

    @rule(module=st.none() | ANY_MODULE)
    def settle(self, module: str | None) -> None:
        if module is None:
            native.settle_all(())
        else:
            native.settle(native.module_id(module))
        stacks = self.captures.values() if module is None else [self.captures[module]]
        for storage, _, counted in (chosen for stack in stacks for record in stack for chosen in record):
            if counted in self.blocks and counted.captures:
                shared = len(storage.tensors) > counted.captures
                self.becomes(counted, "activation_hooks_shared" if shared else "activation_hooks_opacus_only")

    @rule(logical=st.booleans())
    def end_step(self, logical: bool) -> None:
        native.end_step(logical)
        self.physical, self.logical = self.physical + 1, self.logical + logical

    # --- what the core says ---

    @rule()
    def reset_peaks(self) -> None:
        native.reset_peaks()
        self.highest, self.peak_is_open = self.counts.total(), True
        self.peak_step, self.peak_phase = self.physical, self.threads[0].phase

    @rule()
    def peaks(self) -> None:
        peak = native.peaks().get("cpu")
        self.close_peak()
        if peak is None:
            assert self.highest == 0
            return
        assert peak["requested_bytes"] == self.highest == self.peak_counts.total()
        assert without_zeros(peak["categories"]) == self.peak_counts
        assert (peak["step"], peak["phase"]) == (self.peak_step, self.peak_phase)

    @rule()
    def snapshot(self) -> None:
        snapshot = native.snapshot("state machine")
        assert (snapshot["step"], snapshot["logical_step"]) == (self.physical, self.logical) == native.step()
        counts = snapshot["devices"].get("cpu", {"requested_bytes": 0, "categories": {}})
        assert counts["requested_bytes"] == self.counts.total()
        assert without_zeros(counts["categories"]) == +self.counts
        assert native.cpu_reported_bytes() == self.counts.total() + self.reported
        self.snapshots[snapshot["index"]] = +self.counts

    @invariant()
    def every_block_is_right(self) -> None:
        ours = {block["address"]: block for block in native.live_blocks() if block["address"] not in self.foreign}
        assert ours.keys() == {block.address for block in self.blocks}
        for block in self.blocks:
            seen = ours[block.address]
            expected = (block.size, block.category, block.phase, block.module, block.op, block.step)
            names = "bytes", "category", "phase", "module", "op", "step"
            seen["op"] = "" if ".py:" in seen["op"] else seen["op"]  # lines of the program: test_program_lines.py
            assert tuple(seen[name] for name in names) == expected
        outstanding = {native.module_id(name): len(stack) for name, stack in self.captures.items() if stack}
        assert native.captures() == outstanding

    # --- the event file ---

    def replay(self) -> None:
        """At every snapshot the events so far sum to what the counters said."""
        data = (Path(self.directory.name) / "events.bin").read_bytes()
        (count,) = struct.unpack_from("<Q", data, 16)
        assert len(data) == HEADER + 32 * count
        names = native.names()["categories"]
        counts, compared = Counter[str](), 0
        for head, where, what, who in struct.iter_unpack("<4Q", data[HEADER:]):
            kind, category = head >> 48 & 0xFF, names[head >> 56]
            assert where >> 56 == 0  # the CPU
            size, op = what & (1 << 48) - 1, who >> 16 & 0xFFFF
            if kind in (ALLOC, SEED):
                counts[category] += size
            elif kind == FREE:
                counts[category] -= size
            elif kind == RETAG:
                counts[names[op]] -= size
                counts[category] += size
            elif kind == SNAPSHOT:
                assert +counts == self.snapshots[size]
                compared += 1
        assert compared == len(self.snapshots) > 0


def without_zeros(counts: dict[str, int]) -> Counter[str]:
    return +Counter(counts)


def test_looking_at_a_storage_holds_nothing() -> None:
    """Once Python has looked at a storage, torch keeps the wrapper it made, and counts it as a holder."""
    installed = native.cpu_installed()
    native.cpu_install()
    module = native.module_id("looked at")
    try:
        with native.Tag(category=native.category_id("forward_undecided")):
            captured = torch.empty(100)
        address = captured.untyped_storage().data_ptr()
        native.capture(module, [captured])
        native.settle(module)
        (category,) = (block["category"] for block in native.live_blocks() if block["address"] == address)
        native.release(module)
    finally:
        if not installed:
            native.cpu_uninstall()
    assert category == "activation_hooks_opacus_only"


TestCore = Core.TestCase
TestCore.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
