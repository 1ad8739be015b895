# SPDX-License-Identifier: Apache-2.0
"""Snapshots of torch: what is read from them, compared with sums by hand, and files that must be refused."""

import contextlib
import io
import os
import pickle
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from opacus_memprof.analysis.events import PHASE, SNAPSHOT, STEP
from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.analysis.stacks import Frame, Purpose, purposes
from opacus_memprof.analysis.torch_snapshot import TorchSnapshot, profile_of
from opacus_memprof.cli import app
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.core import read_torch_snapshot
from opacus_memprof.profiles.profile import Profile
from tests.event_rows import rows_of

MIB = 2**20
Entry = dict[str, Any]


def frame(name: str, file: str = "/home/me/train.py", line: int = 1) -> Entry:
    return {"name": name, "filename": file, "line": line}


CALL = frame("_call_impl", "/lib/torch/nn/modules/module.py", 9)
SETUP = [frame("_apply", "/lib/torch/nn/modules/module.py"), frame("main")]
FORWARD = [frame("forward", "/lib/torch/nn/modules/linear.py"), CALL, frame("forward", "/home/me/net.py", 7), CALL]
ADAM = [frame("_init_group", "/lib/torch/optim/adam.py"), frame("step", "/lib/torch/optim/adam.py"), frame("main")]
ZERO = [frame("zero_grad", "/lib/torch/optim/optimizer.py"), frame("main")]
AUTOGRAD: list[Entry] = []


class Trace:
    """A trace of one device, as torch writes it, and what is live."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.live: dict[int, tuple[int, list[Entry]]] = {}
        self._time = 1_700_000_000_000_000

    def add(self, action: str, address: int, size: int, frames: list[Entry], **more: Any) -> None:
        self._time += 5
        entry = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": self._time, "frames": frames}
        self.entries.append({**entry, "user_metadata": "", "pool_id": (0, 0), **more})

    def alloc(self, address: int, size: int, frames: list[Entry]) -> None:
        self.add("alloc", address, size, frames)
        self.live[address] = size, frames

    def free(self, address: int, frames: list[Entry] | None = None) -> None:
        size, stack = self.live.pop(address)
        for action in ("free_requested", "free_completed"):
            self.add(action, address, size, stack if frames is None else frames)

    def segments(self) -> list[Entry]:
        total, blocks, place = 64 * MIB, [], 0
        for address, (size, frames) in sorted(self.live.items()):
            if address > place:
                blocks.append({"address": place, "size": address - place, "requested_size": 0, "state": "inactive"})
            state = {"requested_size": size, "state": "active_allocated", "frames": frames}
            blocks.append({"address": address, "size": size, **state})
            place = address + size
        blocks.append({"address": place, "size": total - place, "requested_size": 0, "state": "inactive"})
        return [{"device": 0, "address": 0, "total_size": total, "stream": 0, "is_expandable": False, "blocks": blocks}]

    def write(self, path: Path, entries: list[Entry] | None = None) -> Path:
        trace = self.entries if entries is None else entries
        content = {"segments": self.segments(), "device_traces": [trace, []], "allocator_settings": {}}
        path.write_bytes(pickle.dumps(content))
        return path


def pickled(value: Any) -> bytes:
    """Returns the opcodes of a value, without a memo."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=2)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()[2:-1]


def profile(path: Path) -> Profile:
    return load_profile(profile_of(path))


def one_step(context_all: bool) -> Trace:
    """Parameters, a step with Adam, and the forward pass of the next."""
    trace = Trace()

    def own(stack: list[Entry]) -> list[Entry] | None:
        return stack if context_all else None

    trace.alloc(0, 4 * MIB, SETUP)
    trace.alloc(8 * MIB, 2 * MIB, FORWARD)  # an activation, which backward frees
    trace.alloc(16 * MIB, MIB, FORWARD)  # freed in forward
    trace.free(16 * MIB, own(FORWARD))
    trace.alloc(24 * MIB, 4 * MIB, AUTOGRAD)  # the gradient
    trace.alloc(32 * MIB, MIB, AUTOGRAD)
    trace.free(32 * MIB, own(AUTOGRAD))
    trace.free(8 * MIB, own(AUTOGRAD))
    trace.alloc(40 * MIB, 8 * MIB, ADAM)
    trace.free(24 * MIB, own(ZERO))
    trace.alloc(8 * MIB, 2 * MIB, FORWARD)
    return trace


@pytest.mark.parametrize("context_all", [True, False])
def test_the_peak_and_what_it_consists_of(tmp_path: Path, context_all: bool) -> None:
    device = profile(one_step(context_all).write(tmp_path / "a.pickle")).devices["cuda:0"]
    peak = {name: size for name, size in device.peak.categories.items() if size}
    assert peak == {"model_parameters": 4 * MIB, "gradients": 4 * MIB, "optimizer_states": 8 * MIB}
    assert (device.peak.requested_bytes, device.peak.phase, device.peak.step) == (16 * MIB, "optimizer_step", 0)
    assert device.phases["backward"].categories == {
        "model_parameters": 4 * MIB,
        "activations": 2 * MIB,
        "gradients": 4 * MIB,
        "backward_temporaries": MIB,
    }
    assert device.phases["forward"].step == 1
    assert device.end_bytes == 14 * MIB
    assert device.snapshots[-1].remainder == 0
    assert device.snapshots[-1].reserved_bytes == 64 * MIB


@pytest.mark.parametrize(("parameter", "expected"), [(4 * MIB, "library_workspace"), (32 * MIB, "gradients")])
def test_a_workspace_of_backward_is_no_gradient(tmp_path: Path, parameter: int, expected: str) -> None:
    trace = Trace()
    trace.alloc(0, parameter, SETUP)
    trace.alloc(32 * MIB, MIB, FORWARD)
    trace.free(32 * MIB, AUTOGRAD)
    trace.alloc(32 * MIB, 32 * MIB, AUTOGRAD)  # as large as cuBLAS' workspace
    trace.add("alloc", 2**30, MIB, ADAM)
    trace.add("free_requested", 2**30, MIB, ADAM)
    trace.add("free_completed", 2**30, MIB, ADAM)
    device = profile(trace.write(tmp_path / "a.pickle")).devices["cuda:0"]
    assert device.snapshots[-1].categories[expected] == 32 * MIB


def test_steps_phases_and_snapshots_have_no_stream_or_thread(tmp_path: Path) -> None:
    rows, _ = rows_of(profile_of(one_step(context_all=True).write(tmp_path / "a.pickle")))
    marks = rows[np.isin(rows["kind"], (STEP, PHASE, SNAPSHOT))]
    assert {*marks["kind"].tolist()} == {STEP, PHASE, SNAPSHOT}
    assert not marks["stream"].any()
    assert not marks["thread"].any()


def test_modules_are_the_calls_of_forward(tmp_path: Path) -> None:
    trace = Trace()
    trace.alloc(0, MIB, FORWARD)
    peak = profile(trace.write(tmp_path / "a.pickle")).devices["cuda:0"].peak
    assert peak.modules == {"net:7.linear": {"activations": MIB}}
    assert peak.ops == {"net.py:7 forward": {"activations": MIB}}


def test_names_of_a_recording_are_taken_as_they_are(tmp_path: Path) -> None:
    trace = Trace()
    trace.add("alloc", 0, MIB, AUTOGRAD, user_metadata="mine category=temp_matrices module=head")
    trace.add("alloc", 2 * MIB, MIB, AUTOGRAD, user_metadata="category=teacher")
    trace.add("annotate", 2 * MIB, MIB, AUTOGRAD, user_metadata="category=student module=tail")
    trace.live = {0: (MIB, []), 2 * MIB: (MIB, [])}
    peak = profile(trace.write(tmp_path / "a.pickle")).devices["cuda:0"].peak
    assert peak.modules == {"head": {"temp_matrices": MIB}, "tail": {"student": MIB}}


def test_blocks_older_than_the_trace_count_from_its_beginning(tmp_path: Path) -> None:
    trace = one_step(context_all=True)
    cut = next(i for i, entry in enumerate(trace.entries) if entry["addr"] == 32 * MIB)
    found = profile(trace.write(tmp_path / "a.pickle", trace.entries[cut:]))
    device = found.devices["cuda:0"]
    assert device.peak.requested_bytes == 16 * MIB
    assert {name: size for name, size in device.peak.categories.items() if size} == {
        "model_parameters": 4 * MIB,
        "gradients": 4 * MIB,  # for zero_grad frees them
        "optimizer_states": 8 * MIB,
    }
    assert device.snapshots[-1].remainder == 0
    assert any("10.00 MiB were allocated before the trace begins" in sentence for sentence in found.warnings)


def test_a_block_of_another_stream_lives_until_its_free_completes(tmp_path: Path) -> None:
    trace = Trace()
    trace.alloc(0, 4 * MIB, SETUP)
    trace.add("free_requested", 0, 4 * MIB, SETUP)
    trace.alloc(8 * MIB, MIB, SETUP)
    trace.add("free_completed", 0, 4 * MIB, SETUP)
    del trace.live[0]
    device = profile(trace.write(tmp_path / "a.pickle")).devices["cuda:0"]
    peak = {name: size for name, size in device.peak.categories.items() if size}
    assert peak == {"pending_free": 4 * MIB, "model_parameters": MIB}
    assert device.end_bytes == MIB


def test_reserved_memory_is_that_at_the_peak(tmp_path: Path) -> None:
    trace = Trace()
    trace.add("segment_alloc", 0, 40 * MIB, SETUP)
    trace.alloc(0, 4 * MIB, SETUP)
    trace.free(0)
    trace.add("segment_alloc", 40 * MIB, 24 * MIB, SETUP)
    trace.alloc(8 * MIB, MIB, SETUP)
    assert profile(trace.write(tmp_path / "a.pickle")).devices["cuda:0"].peak.reserved_bytes == 40 * MIB


def test_an_allocation_that_failed(tmp_path: Path) -> None:
    trace = one_step(context_all=True)
    trace.add("oom", 0, 99 * MIB, FORWARD, device_free=0)
    del trace.entries[-1]["addr"]
    found = profile(trace.write(tmp_path / "a.pickle"))
    failure = found.devices["cuda:0"].out_of_memory[0]
    assert found.status == "out_of_memory"
    assert (failure.requested_bytes, failure.live_bytes, failure.module) == (99 * MIB, 14 * MIB, "net:7.linear")


def test_fragments_are_a_finding(tmp_path: Path) -> None:
    findings = profile(one_step(context_all=True).write(tmp_path / "a.pickle")).findings
    fragments = next(finding for finding in findings if finding.kind == "fragmentation")
    assert fragments.bytes == 50 * MIB
    assert "50.00 MiB of the 64.00 MiB" in fragments.evidence
    assert "the largest piece has 30.00 MiB" in fragments.evidence


@pytest.mark.parametrize("seed", range(20))
def test_random_traces(tmp_path: Path, seed: int) -> None:
    """Traces that begin anywhere, against a simulation of every block."""
    chosen = random.Random(seed)
    trace = Trace()
    history = []
    for _ in range(200):
        if trace.live and chosen.random() < 0.45:
            trace.free(chosen.choice(list(trace.live)), chosen.choice([None, AUTOGRAD, ZERO]))
        else:
            address = chosen.choice([place * MIB for place in range(64) if place * MIB not in trace.live])
            trace.alloc(address, chosen.randrange(1, MIB), chosen.choice([SETUP, FORWARD, AUTOGRAD, ADAM]))
        history += [sum(size for size, _ in trace.live.values())] * (len(trace.entries) - len(history))
    cut = chosen.randrange(len(trace.entries))
    found = profile(trace.write(tmp_path / "a.pickle", trace.entries[cut:]))
    device = found.devices["cuda:0"]
    begins = history[cut - 1] if cut else 0
    if cut and trace.entries[cut]["action"] == "free_completed":  # freed, but live until now
        begins += trace.entries[cut]["size"]
    assert device.peak.requested_bytes == max([begins, *history[cut:]])
    assert device.end_bytes == history[-1]
    assert device.peak.requested_bytes == sum(device.peak.categories.values())
    assert set(dict(found.events.contradictions).values()) == {0}


def test_a_trace_without_stacks_says_how_to_record_them(tmp_path: Path) -> None:
    trace = one_step(context_all=False)
    for entry in trace.entries:
        del entry["frames"]
    trace.live = {address: (size, []) for address, (size, _) in trace.live.items()}
    found = profile(trace.write(tmp_path / "a.pickle"))
    assert found.devices["cuda:0"].peak.categories["unattributed"] == 16 * MIB
    assert any("snapshot of torch without stacks" in sentence for sentence in found.warnings)


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        ([CALL, frame("backward", "/x/torch/_tensor.py")], Purpose("backward", "backward_temporaries")),
        ([CALL, frame("recompute_fn", "/x/torch/utils/checkpoint.py")], Purpose("backward", "forward_undecided")),
        ([frame("torch::autograd::Engine::thread_main(x)", "??")], Purpose("backward", "backward_temporaries")),
        ([frame("torch::autograd::THPVariable_mm", "??"), CALL], Purpose("forward", "forward_undecided")),
        ([frame("_fused_adam", "/x/torch/optim/adam.py")], Purpose("optimizer_step", "optimizer_temporaries")),
        ([frame("add_noise", "/x/opacus/optimizers/optimizer.py")], Purpose("noise", "noise")),
        ([frame("fetch", "/x/torch/utils/data/_utils/fetch.py")], Purpose("", "inputs")),
        ([frame("main")], Purpose("idle", "unattributed", "", "train.py:1 main")),
    ],
)  # fmt: skip
def test_what_a_stack_tells(stack: list[Entry], expected: Purpose) -> None:
    frames = [Frame(call["name"], call["filename"], call["line"]) for call in reversed(stack)]
    assert purposes(frames, range(-1, len(frames)), range(-1, len(frames)))[-1] == expected


def test_the_profile_is_beside_the_file_and_follows_it(tmp_path: Path) -> None:
    path = one_step(context_all=True).write(tmp_path / "run.pickle")
    assert profile_of(path) == tmp_path / "run.memprof"
    made = (tmp_path / "run.memprof" / "profile.json").stat().st_mtime_ns
    assert profile_of(path) == tmp_path / "run.memprof"
    assert (tmp_path / "run.memprof" / "profile.json").stat().st_mtime_ns == made
    trace = Trace()
    trace.alloc(0, MIB, SETUP)
    trace.write(path)
    os.utime(path, ns=(made + 10**9, made + 10**9))
    assert profile(path).devices["cuda:0"].peak.requested_bytes == MIB


def test_a_directory_of_other_files_is_not_overwritten(tmp_path: Path) -> None:
    path = one_step(context_all=True).write(tmp_path / "run.pickle")
    (tmp_path / "run.memprof").mkdir()
    (tmp_path / "run.memprof" / "thesis.tex").write_text("mine")
    with pytest.raises(MemprofError, match="choose another directory"):
        profile_of(path)


def test_the_commands_take_the_file(tmp_path: Path) -> None:
    before = one_step(context_all=True).write(tmp_path / "before.pickle")
    changed = one_step(context_all=True)
    changed.alloc(48 * MIB, 16 * MIB, SETUP)
    after = changed.write(tmp_path / "after.pickle")
    shown = CliRunner().invoke(app, ["report", str(before), "--html"])
    assert shown.exit_code == 0, shown.output
    assert "PEAK 16.00 MiB in optimizer step of step 0" in shown.output
    assert (tmp_path / "before.memprof" / "memprof.html").is_file()
    compared = CliRunner().invoke(app, ["diff", str(before), str(after), "--fail-above", "1MiB"])
    assert compared.exit_code == 1
    assert "peak 16.00 MiB → 30.00 MiB (+14.00 MiB" in compared.output


class Attack:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


def hostile(tmp_path: Path) -> dict[str, tuple[bytes, str]]:
    touch = (os.system, (f"touch {tmp_path / 'attacked'}",))
    inside: dict[str, Any] = {"segments": [], "device_traces": [[{"action": Attack(*touch)}]]}
    whole = pickle.dumps({"segments": [], "device_traces": []})
    entry = {"action": "alloc", "addr": 512, "size": 1, "stream": 0, "time_us": 1, "frames": []}
    wrong = "values do not fit together"
    asks = "asks Python to import or call"
    start, stop = b"\x80\x04", b"."
    # 2300 lists of 1000 frames, of which hardly two begin alike.
    frames = b"".join(b"}\x94" + pickled(frame("f", line=line))[1:] for line in range(8))
    stacks = bytearray(b"h\x00" * 2_300_000)
    stacks[1::2] = random.Random(0).randbytes(2_300_000).translate(bytes(number % 8 for number in range(256)))
    distinct = b"".join(b"](" + stacks[first : first + 2000] + b"e" for first in range(0, len(stacks), 2000))
    references = b"]\x94" + b"".join(b"(" + b"h\x00" * 500 + b"e" for _ in range(40))
    return {
        "reduce": (pickle.dumps(Attack(*touch)), asks),
        "reduce in an entry": (pickle.dumps(inside), asks),
        "protocol 2": (pickle.dumps(inside, protocol=2), asks),
        "global": (start + b"cos\nsystem\n(X\x02\x00\x00\x00idtR.", asks),
        "stack global": (start + b"\x8c\x02os\x8c\x06system\x93.", asks),
        "instance": (start + b"(X\x02\x00\x00\x00idios\nsystem\n.", asks),
        "persistent id": (start + b"Pmine\n.", asks),
        "extension": (start + b"\x82\x01.", asks),
        "protocol 0": (pickle.dumps({"segments": []}, protocol=0), "does not begin as a pickle does"),
        "another file": (b"PK\x03\x04 a zip", "does not begin as a pickle does"),
        "empty": (b"", "ends after 0 bytes"),
        "unknown protocol": (b"\x80\x09" + whole[2:], "version 9 of pickles is not known"),
        "other pickle": (pickle.dumps([1, 2]), "not a memory snapshot with segments and device_traces"),
        "no dict": (pickle.dumps({"segments": [], "device_traces": {}}), "values do not fit together"),
        "numbers as traces": (pickle.dumps({"segments": [], "device_traces": [1]}), "values do not fit together"),
        "a set": (pickle.dumps({"segments": {1}}), "a value that no snapshot has"),
        "no memo": (start + b"h\x07.", "values do not fit together"),
        "far memo": (start + b"Nr\xff\xff\xff\xff.", "values do not fit together"),
        "no mark": (start + b"]e.", "values do not fit together"),
        "nothing to append to": (start + b"Na.", "values do not fit together"),
        "nothing at all": (start + b"a.", "values do not fit together"),
        "long string": (start + b"\x8d" + struct.pack("<Q", 2**60) + b"x.", "a string of 1152921504606846976 bytes"),
        "memo bomb": (start + b"N" + b"\x94" * 10_000 + stop, "more objects than a snapshot"),
        "list bomb": (start + b"]" * 10_000 + stop, "more objects than a snapshot"),
        "deep": (start + b"N" * (2**20 + 2) + stop, "nested deeper than a snapshot"),
        **{
            f"{name} {value}": (pickle.dumps({"segments": [], "device_traces": [[{**entry, name: value}]]}), wrong)
            for name, value in [
                *(("size", wrong_size) for wrong_size in (-1, 0.5, float("nan"), 2**48, 2**80, "1")),
                *(("time_us", wrong_time) for wrong_time in (-1, float("inf"), 2**53)),
            ]
        },
        "references": (start + references + stop, "not a memory snapshot"),
        "lists of lists": (start + b"](" + b"]Na" * 10_000 + b"e" + stop, "more objects than a snapshot"),
        "distinct stacks": (start + b"](" + frames + distinct + b"e.", "more different stacks than a snapshot"),
    }  # fmt: skip


@pytest.mark.parametrize("name", hostile(Path("/tmp")))
def test_hostile_files_are_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    content, reason = hostile(tmp_path)[name]
    path = tmp_path / "a.pickle"
    path.write_bytes(content)
    result = CliRunner().invoke(app, ["report", str(path)])
    assert isinstance(result.exception, MemprofError), result.output
    assert str(result.exception).startswith(f"{path} cannot be read as a snapshot of torch (")
    assert reason in str(result.exception)
    assert [file.name for file in tmp_path.iterdir()] == ["a.pickle"]


def test_every_cut_file_is_refused(tmp_path: Path) -> None:
    path = one_step(context_all=True).write(tmp_path / "a.pickle")
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(RuntimeError, match=r"ends after|does not begin"):
            read_torch_snapshot(str(path))


def test_changed_bytes_are_refused_or_read(tmp_path: Path) -> None:
    path = one_step(context_all=True).write(tmp_path / "a.pickle")
    whole = path.read_bytes()
    chosen = random.Random(0)
    for _ in range(2000):
        changed = bytearray(whole)
        for _ in range(chosen.randrange(1, 4)):
            changed[chosen.randrange(len(whole))] = chosen.randrange(256)
        path.write_bytes(changed)
        with contextlib.suppress(RuntimeError):
            read_torch_snapshot(str(path))


def test_repeated_items_cannot_make_a_small_file_large(tmp_path: Path) -> None:
    trace = one_step(context_all=True)
    entry = trace.entries[0]
    content = {"segments": trace.segments(), "device_traces": [[entry] * 1000] * 100}
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(content))
    with pytest.raises(RuntimeError, match="values do not fit together"):
        read_torch_snapshot(str(tmp_path / "a.pickle"))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_all_protocols_without_memo_too(tmp_path: Path, protocol: int) -> None:
    trace = one_step(context_all=True)
    content = {"segments": trace.segments(), "device_traces": [trace.entries]}
    expected = None
    for fast in (False, True):
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, protocol)
        pickler.fast = fast  # writes equal values again, without the memo
        pickler.dump(content)
        (tmp_path / "a.pickle").write_bytes(buffer.getvalue())
        read = read_torch_snapshot(str(tmp_path / "a.pickle"))["entries"]
        fields = [struct.unpack("<4Q", read[place : place + 32]) for place in range(0, len(read), 48)]
        assert fields == [(e["addr"], e["size"], 0, e["time_us"]) for e in trace.entries]
        expected = expected or fields
        assert fields == expected


def test_a_snapshot_of_an_old_torch_and_of_nothing(tmp_path: Path) -> None:
    trace = one_step(context_all=True)
    segments = trace.segments()
    del segments[0]["blocks"][0]["requested_size"]
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": []}))
    with pytest.raises(MemprofError, match=r"written by a torch older than 2\.1"):
        profile_of(path)
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": []}))
    with pytest.raises(MemprofError, match="used no memory of a GPU"):
        profile_of(path)
    free = {"address": 0, "size": MIB, "requested_size": 0, "state": "inactive"}
    reserved = [{"action": "segment_alloc", "addr": 0, "size": MIB, "stream": 0, "time_us": 1, "frames": []}]
    for trace in ([], reserved):
        content = {"segments": [{**segments[0], "blocks": [free]}], "device_traces": [trace]}
        path.write_bytes(pickle.dumps(content))
        with pytest.raises(MemprofError, match="has no allocation, neither live nor in a trace"):
            profile_of(path)


def test_names_cannot_control_the_terminal(tmp_path: Path) -> None:
    trace = Trace()
    trace.add("alloc", 0, MIB, [], user_metadata="category=x\x1b[31m module=\x00y")
    path = trace.write(tmp_path / "a.pickle")
    shown = CliRunner().invoke(app, ["report", str(path)])
    assert shown.exit_code == 0, shown.output
    assert r"x\x1b[31m" in shown.output
    assert r"\x00y" in shown.output
    assert "\x1b" not in shown.output
    assert "\x00" not in shown.output


def test_an_annotation_of_an_unknown_block_is_ignored(tmp_path: Path) -> None:
    trace = one_step(context_all=True)
    expected = profile(trace.write(tmp_path / "a.pickle")).devices["cuda:0"]
    trace.add("annotate", 2**40, MIB, [])
    annotated = profile(trace.write(tmp_path / "b.pickle")).devices["cuda:0"]
    assert annotated.peak.categories == expected.peak.categories
    assert annotated.peak.requested_bytes == expected.peak.requested_bytes == 16 * MIB


def test_a_long_trace_takes_under_250_bytes_an_entry(tmp_path: Path) -> None:
    """A gigabyte of entries without stacks, 61 bytes each, must not take more than 4 GB."""
    entry = {"addr": 512, "size": 4096, "stream": 0, "time_us": 1_700_000_000_000_000, "frames": []}
    block = b"".join(pickled({"action": action, **entry}) for action in ("alloc", "free_requested", "free_completed"))
    traces = b"](](" + (block * 300 + b"e(") * 1000 + b"ee"
    content = b"\x80\x02}(" + pickled("segments") + b"]" + pickled("device_traces") + traces + b"u."
    (tmp_path / "a.pickle").write_bytes(content)
    tracemalloc.start()
    try:
        snapshot = TorchSnapshot(tmp_path / "a.pickle")
        snapshot.write(tmp_path)
        assert 48 < tracemalloc.get_traced_memory()[1] / 900_000 < 250
    finally:
        tracemalloc.stop()
