# SPDX-License-Identifier: Apache-2.0
"""The stream of a running session: what it says, that it stays small, and that it disturbs nothing."""

import json
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import opacus_memprof
from opacus_memprof.profiles.live_memory import LiveDevice, LiveMemory
from opacus_memprof.profiles.profile import HookedActivations, ReservedPeak
from opacus_memprof.recording import native
from opacus_memprof.recording.live import read_live
from opacus_memprof.recording.prometheus import PrometheusFile
from opacus_memprof.recording.stream import JsonLines, make_sinks

MIB = 2**20

pytestmark = pytest.mark.usefixtures("clean_process")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(sample.labels[name] for name in ("device", "category", "phase") if name in sample.labels)): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def wait_until(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_json_lines_say_what_was_live(tmp_path: Path) -> None:
    file = tmp_path / "new" / "memory.jsonl"
    with opacus_memprof.profile(tmp_path / "p", device="cpu", stream=str(file), stream_interval=0.02) as session:
        with opacus_memprof.tag("inputs"):
            in_use = torch.empty(3 * MIB, dtype=torch.uint8)
        more = torch.empty(2 * MIB, dtype=torch.uint8)
        del more
        expected = session.snapshot("now")["devices"]["cpu"]["requested_bytes"]
        begin = len(lines(file))
        wait_until(lambda: len(lines(file)) >= begin + 3)
        newest = lines(file)[-1]
    assert (
        newest["devices"]["cpu"]["requested_bytes"] == expected == sum(newest["devices"]["cpu"]["categories"].values())
    )
    assert newest["devices"]["cpu"]["categories"]["inputs"] == 3 * MIB
    assert newest["devices"]["cpu"]["peak_bytes"] == session.result["devices"]["cpu"]["peak"]["requested_bytes"]
    assert newest["devices"]["cpu"]["phase"] == "idle"
    assert (newest["step"], newest["rank"]) == (0, None)
    assert abs(newest["unix_ns"] - time.time_ns()) < 60e9
    assert session.result["warnings"] == []
    assert [snapshot["name"] for snapshot in session.result["devices"]["cpu"]["snapshots"]] == ["now", "end"]
    assert not [thread for thread in threading.enumerate() if "opacus-memprof stream" in thread.name]
    del in_use


def test_steps_and_phases_are_those_of_training(tmp_path: Path) -> None:
    """Read inside backward and after each step: the phase is that of the newest allocation."""
    seen = []
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    with opacus_memprof.profile(tmp_path / "p", device="cpu") as session:
        session.attach(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(8, 64)).square().mean()
            seen.append(("forward", read_live()))
            loss.backward()
            seen.append(("backward", read_live()))
            optimizer.step()
            seen.append(("optimizer_step", read_live()))
    assert [(reading["step"], reading["devices"]["cpu"]["phase"]) for _, reading in seen] == [
        (step + (phase == "optimizer_step"), phase)
        for step in range(3)
        for phase in ("forward", "backward", "optimizer_step")
    ]
    parameters = 4 * (64 * 64 + 64)
    last = seen[-1][1]["devices"]["cpu"]["categories"]
    assert last["model_parameters"] == last["gradients"] == parameters
    assert (
        last["optimizer_states"] == 2 * parameters + 2 * 4
    )  # two moments of each, and a step count for each of the two


def reading(step: int) -> LiveMemory:
    categories = {"noise": step, "inputs": 0}
    reserved = ReservedPeak(bytes=4000, step=0, phase="idle")
    device = LiveDevice(step, 999, "idle", categories, HookedActivations(0, 0), reserved)
    return LiveMemory(unix_ns=0, pid=1, rank=None, step=step, logical_step=step // 2, devices={"cpu": device})


def test_a_file_of_lines_stays_bounded_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sink, prometheus = JsonLines("memory.jsonl", max_bytes=2000), PrometheusFile("memory.prom")
    sink.open()
    monkeypatch.chdir("/")  # as a program may
    prometheus.write(reading(7))
    published = metrics((tmp_path / "memory.prom").read_text())
    assert (published["opacus_memprof_steps",], published["opacus_memprof_logical_steps",]) == (7, 3)
    assert published["opacus_memprof_peak_bytes", "cpu"] == 999
    assert published["opacus_memprof_reserved_peak_bytes", "cpu"] == 4000
    for number in range(200):
        sink.write(reading(number))
    sink.close()
    older, newer = tmp_path / "memory.jsonl.1", tmp_path / "memory.jsonl"
    assert older.stat().st_size <= 2000
    assert newer.stat().st_size <= 2000
    numbers = [line["step"] for line in lines(older) + lines(newer)]
    assert numbers == list(range(numbers[0], 200))
    assert lines(newer)[-1]["devices"]["cpu"]["categories"] == {"noise": 199}
    sink.open()  # a later run goes on
    sink.write(reading(200))
    sink.close()
    assert lines(newer)[-1]["step"] == 200


def test_prometheus_by_file_and_by_address(tmp_path: Path, unused_port: int) -> None:
    file = tmp_path / "memory.prom"
    address = f"http://127.0.0.1:{unused_port}"
    with opacus_memprof.profile(tmp_path / "p", device="cpu", stream=[file, address], stream_interval=0.02):
        with opacus_memprof.tag("noise"):
            in_use = torch.empty(MIB, dtype=torch.uint8)
        key = ("opacus_memprof_memory_bytes", "cpu", "noise")
        with urllib.request.urlopen(f"{address}/metrics") as answer:
            scraped = metrics(answer.read().decode())
        wait_until(lambda: metrics(file.read_text()).get(key) == MIB)
        written = metrics(file.read_text())
        counted = native.counters()["devices"]["cpu"]
    assert scraped[key] == MIB
    assert scraped["opacus_memprof_phase", "cpu", "idle"] == 1
    assert sum(value for name, value in scraped.items() if name[0] == "opacus_memprof_phase") == 1
    assert scraped["opacus_memprof_steps",] == 0
    for found in (scraped, written):
        live = [value for name, value in found.items() if name[0] == "opacus_memprof_memory_bytes"]
        assert sum(live) == counted["requested_bytes"]
        assert found["opacus_memprof_peak_bytes", "cpu"] == counted["peak_bytes"]
    assert not file.exists()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{address}/metrics")
    del in_use


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_profile_is_as_without_a_stream(tmp_path: Path) -> None:
    """The same events, and the same losses, though the counters are read a thousand times a second."""

    def run(name: str, **stream: Any) -> tuple[np.ndarray, list[float]]:
        torch.manual_seed(0)
        model = torch.nn.Linear(32, 32)
        optimizer = torch.optim.Adam(model.parameters())
        losses = []
        with opacus_memprof.profile(tmp_path / name, device="cpu", **stream) as session:
            session.attach(model, optimizer)
            for _ in range(30):
                optimizer.zero_grad()
                loss = model(torch.ones(8, 32)).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        words = np.fromfile(tmp_path / name / "events.bin", "<u8", offset=4096).reshape(-1, 4)
        kinds, sizes = words[:, 0] >> 48 & 0xFF, words[:, 2] & (1 << 48) - 1
        of_training = kinds <= 5  # snapshots are numbered through the process
        return np.stack([kinds, sizes, words[:, 0] >> 56])[:, of_training], losses

    run("warm")
    plain, losses = run("plain")
    streamed, same = run("streamed", stream=str(tmp_path / "memory.jsonl"), stream_interval=0.001)
    assert same == losses
    assert np.array_equal(plain, streamed)
    assert len(lines(tmp_path / "memory.jsonl")) > 2


class FullDisk:
    def __init__(self, fails: str) -> None:
        self.fails, self.calls = fails, list[str]()

    def __str__(self) -> str:
        return "a full disk"

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails:
            raise OSError("no space left")

    def open(self) -> None:
        self._call("open")

    def write(self, reading: dict[str, Any]) -> None:
        self._call("write")

    def close(self) -> None:
        self._call("close")


@pytest.mark.parametrize(
    ("fails", "sentence", "calls"),
    [
        ("write", "ended at step 0", ["open", "write", "close"]),
        ("close", "could not be closed", ["open", "write", "write", "close"]),
    ],
)
def test_a_stream_that_fails_ends_alone(tmp_path: Path, fails: str, sentence: str, calls: list[str]) -> None:
    file, disk = tmp_path / "memory.jsonl", FullDisk(fails)
    with opacus_memprof.profile(tmp_path / "p", device="cpu", stream=[disk, file]) as session:
        pass
    assert session.result["warnings"] == [f"the stream to a full disk {sentence} (no space left)"]
    assert disk.calls == calls
    assert len(lines(file)) == 2


def test_each_rank_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert str(make_sinks("http://127.0.0.1:9464")[0]) == "http://127.0.0.1:9465"  # of its machine
    with opacus_memprof.profile(tmp_path / "p", device="cpu", stream=tmp_path / "memory.jsonl"):
        pass
    assert lines(tmp_path / "memory.rank_5.jsonl")[0]["rank"] == 5


@pytest.mark.parametrize(
    ("stream", "sentence"),
    [
        ({"stream": "memory.csv"}, "cannot stream to 'memory.csv': give a file that ends in .jsonl or .prom"),
        ({"stream": "http://localhost"}, "cannot stream to 'http://localhost'"),
        ({"stream": "http://localhost:99999"}, "cannot stream to 'http://localhost:99999'"),
        ({"stream": 9464}, "cannot stream to 9464"),
        ({"stream": "/proc/none/memory.jsonl"}, "cannot stream to /proc/none/memory.jsonl"),
        ({"stream": "/proc/none/memory.prom"}, "cannot stream to /proc/none/memory.prom"),
        ({"stream": "memory.jsonl", "stream_interval": 0}, "the stream_interval 0 is not possible"),
    ],
)
def test_what_is_refused(
    stream: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(opacus_memprof.MemprofError, match=sentence),
        opacus_memprof.profile("p", device="cpu", **stream),
    ):
        pass
    assert opacus_memprof.session.current() is None
    assert not native.cpu_installed()
    assert not (tmp_path / "p").exists()


def test_a_port_that_is_taken(tmp_path: Path, unused_port: int) -> None:
    address, opened = f"http://127.0.0.1:{unused_port}", FullDisk("")
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", unused_port))
        listener.listen()
        with (
            pytest.raises(opacus_memprof.MemprofError, match=f"cannot serve on {address}"),
            opacus_memprof.profile(tmp_path / "p", device="cpu", stream=[opened, address]),
        ):
            pass
    assert opened.calls == ["open", "close"]
    assert opacus_memprof.session.current() is None
