# SPDX-License-Identifier: Apache-2.0
"""What a snapshot on CUDA adds up, with statistics as torch's allocators give them."""

import gc
from typing import Any

import pytest
import torch

from opacus_memprof.profiles.live_memory import DeviceCount
from opacus_memprof.recording import live, native

LEDGER = {"model_parameters": 3000, "noise": 1000, "pending_free": 0}


def stats(**current: int) -> dict[str, int]:
    return {f"{name}.all.current": count for name, count in current.items()}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with one GPU whose counts a test sets."""

    class Machine:
        stats = stats(requested_bytes=4000, active_bytes=4608, allocated_bytes=4608, reserved_bytes=2**21)
        free, total = 2**30, 2**30 + 2**21 + 12345
        pending = 0

        def memory_stats(self, device: str) -> dict[str, int]:
            assert device == "cuda:0"
            assert not gc.isenabled()  # nothing may be freed between two counts
            if isinstance(self.stats, RuntimeError):
                raise self.stats
            return self.stats

        def mem_get_info(self, device: str) -> tuple[int, int]:
            if self.free is None:
                raise RuntimeError("CUDA error: device-side assert triggered")
            return self.free, self.total

        def refresh(self, index: int) -> int:
            assert index == 0
            if self.pending is None:
                raise RuntimeError("keeps no snapshot")
            return self.pending

    machine = Machine()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_stats", machine.memory_stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", machine.mem_get_info)
    monkeypatch.setattr(native, "HAS_CUDA", True)
    monkeypatch.setattr(native, "cuda_refresh", machine.refresh)
    counts = {"cuda:0": {"requested_bytes": 4000, "categories": dict(LEDGER)}}
    taken = {"index": 0, "name": "now", "unix_ns": 0, "step": 0, "logical_step": 0, "devices": counts}
    monkeypatch.setattr(native, "snapshot", lambda name: taken)
    return machine


def snapshot_of_gpu() -> DeviceCount:
    assert gc.isenabled()
    device = live.take_snapshot("now").devices["cuda:0"]
    assert gc.isenabled()
    assert sum(device["categories"].values()) == device["requested_bytes"]
    return device


def test_the_sums_end_at_what_the_device_uses(cuda: Any) -> None:
    device = snapshot_of_gpu()
    assert device["remainder"] == 0
    assert device["requested_bytes"] + device["rounding"] == device["allocated_bytes"] == 4608
    assert device["allocated_bytes"] + device["cached"] == device["reserved_bytes"] == 2**21
    assert device["reserved_bytes"] + device["outside_pytorch"] == cuda.total - cuda.free
    assert device["outside_pytorch"] == 12345


def test_a_program_s_collection_stays_off(cuda: Any) -> None:
    gc.disable()
    try:
        live.take_snapshot("now")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_waits_for_a_side_stream_is_counted_once(cuda: Any) -> None:
    # torch still counts the block as requested and as active, but no longer as allocated.
    cuda.pending = 500
    cuda.stats = stats(requested_bytes=4500, active_bytes=5120, allocated_bytes=4608, reserved_bytes=2**21)
    device = snapshot_of_gpu()
    assert device["categories"]["pending_free"] == 500
    assert device["remainder"] == 0
    assert device["requested_bytes"] + device["rounding"] + device["cached"] == 2**21


def test_captures_are_one_category_and_its_two_parts(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    in_use = {"activation_hooks_shared": 1000, "activation_hooks_opacus_only": 500, "noise": 2500}
    taken = native.snapshot("now")
    taken["devices"]["cuda:0"]["categories"] = in_use
    device = snapshot_of_gpu()
    assert device.categories == {"activation_hooks": 1500, "noise": 2500}
    assert device.activation_hooks == {"shared_with_autograd": 1000, "opacus_only": 500}


def test_a_difference_shows(cuda: Any) -> None:
    cuda.stats = stats(requested_bytes=4007, active_bytes=4608, allocated_bytes=4608, reserved_bytes=2**21)
    assert snapshot_of_gpu()["remainder"] == 7


def test_cuda_malloc_async_counts_two_things(cuda: Any) -> None:
    cuda.pending = None
    cuda.stats = stats(requested_bytes=0, active_bytes=0, allocated_bytes=4000, reserved_bytes=2**21)
    device = snapshot_of_gpu()
    assert (device["remainder"], device["rounding"], device["cached"]) == (0, 0, 2**21 - 4000)


@pytest.mark.parametrize("counts", [stats(requested_bytes=0, allocated_bytes=0), RuntimeError("not supported"), {}])
def test_where_nobody_counts_nothing_is_claimed(cuda: Any, counts: Any) -> None:
    cuda.stats = counts
    device = snapshot_of_gpu()
    assert device["requested_bytes"] == 4000
    assert device["remainder"] is device["rounding"] is device["cached"] is device["allocated_bytes"] is None


def test_an_empty_device_is_counted(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    native.snapshot("now")["devices"]["cuda:0"] = {"requested_bytes": 0, "categories": {"noise": 0}}
    cuda.stats = stats(requested_bytes=0, active_bytes=0, allocated_bytes=0, reserved_bytes=2**21)
    device = snapshot_of_gpu()
    assert (device["remainder"], device["allocated_bytes"], device["cached"]) == (0, 0, 2**21)


def test_a_device_in_error_leaves_what_is_known(cuda: Any) -> None:
    cuda.free = None
    device = snapshot_of_gpu()
    assert device["outside_pytorch"] is None
    assert device["remainder"] == 0
