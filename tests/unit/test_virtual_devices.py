# SPDX-License-Identifier: Apache-2.0
"""The table of virtual GPUs agrees with NVIDIA's data sheets and programming guide, and with torch's view of one.

And what a process has of them: memory, ranks and their store, caches of compilers, its end.
"""

import importlib
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opacus_memprof.errors import MemprofError
from opacus_memprof.virtual_gpu import collectives, process, simulated_rank
from opacus_memprof.virtual_gpu.devices import GPUS, LIMITS
from opacus_memprof.virtual_gpu.requirements import LIBRARIES, check_machine
from opacus_memprof.virtual_gpu.simulated_rank import SimulatedRank, check_ranks, local_world_size
from opacus_memprof.virtual_gpu.store import SingleRankStore
from tests.warm_python import ENVIRONMENT, interpreter

# From NVIDIA's data sheets: the label's GiB, GB/s of memory, TFLOP/s of float32 outside tensor cores.
SHEETS = {
    "t4": (16, 320, 8.1),
    "v100": (32, 900, 15.7),
    "v100-16": (16, 900, 15.7),
    "a100-40": (40, 1555, 19.5),
    "a100-80": (80, 2039, 19.5),
    "a10": (24, 600, 31.2),
    "a6000": (48, 768, 38.7),
    "l4": (24, 300, 30.3),
    "l40": (48, 864, 90.5),
    "l40s": (48, 864, 91.6),
    "rtx3090": (24, 936, 35.6),
    "rtx4090": (24, 1008, 82.6),
    "rtx5090": (32, 1792, 104.8),
    "rtxpro6000": (96, 1792, 125),
    "h100": (80, 3350, 67),
    "gh200": (96, 4000, 67),
    "h200": (141, 4800, 67),
    "b200": (180, 8000, 75),
    "b300": (270, 8000, 75),
}

# From the CUDA C++ Programming Guide: resident threads and blocks of a multiprocessor, and its KB of shared memory.
GUIDE = {
    (7, 0): (2048, 32, 96),
    (7, 5): (1024, 16, 64),
    (8, 0): (2048, 32, 164),
    (8, 6): (1536, 16, 100),
    (8, 9): (1536, 24, 100),
    (9, 0): (2048, 32, 228),
    (10, 0): (2048, 32, 228),
    (10, 3): (2048, 32, 228),
    (12, 0): (1536, 24, 100),
}


def cores(capability: tuple[int, int]) -> int:
    """Of float32, in a multiprocessor."""
    return 64 if capability <= (8, 0) else 128


@pytest.mark.parametrize("kind", GPUS)
def test_a_gpu_is_that_of_its_data_sheet(kind: str) -> None:
    gpu, (gib, bandwidth, teraflops) = GPUS[kind], SHEETS[kind]
    assert 0.9 < gpu.total_memory / (gib << 30) < 1
    assert gpu.total_memory % (64 << 10) == 0
    assert gpu.memory_bus_bits / 8 * gpu.memory_clock_khz * 2 / 1e6 == pytest.approx(bandwidth, rel=0.05)
    assert gpu.multiprocessors * cores(gpu.capability) * 2 * gpu.clock_khz / 1e9 == pytest.approx(teraflops, rel=0.01)


@pytest.mark.parametrize("capability", LIMITS)
def test_a_capability_has_the_guides_limits(capability: tuple[int, int]) -> None:
    limits, (threads, blocks, shared) = LIMITS[capability], GUIDE[capability]
    assert (limits.threads_per_multiprocessor, limits.blocks_per_multiprocessor) == (threads, blocks)
    assert limits.shared_memory_per_multiprocessor == shared * 1024
    reserved = 1024 if capability >= (8, 0) else 0  # the system keeps 1 KB of every block
    assert limits.shared_memory_per_block_optin == shared * 1024 - reserved


# Of wheels for CUDA 13, and of those for CUDA 12.6.
@pytest.mark.parametrize("kernels", [(75, 80, 86, 90, 100, 120), (50, 60, 70, 75, 80, 86, 90)])
@pytest.mark.parametrize("kind", GPUS)
def test_kernels_are_the_newest_of_torchs_that_run_there(kind: str, kernels: tuple[int, ...]) -> None:
    gpu = GPUS[kind]
    own = 10 * gpu.major + gpu.minor
    running = [kernel for kernel in kernels if kernel // 10 == own // 10 and kernel <= own]
    expected = max(running) if running else min(kernels)  # a V100 with CUDA 13, a B200 with 12.6
    assert gpu.kernel_architecture(kernels) == expected
    assert gpu.kernel_architecture([]) == own


@pytest.mark.skipif(not LIBRARIES.is_dir(), reason="built without the virtual GPU")
def test_the_build_has_found_torchs_kernels() -> None:
    listed = (torch._C._cuda_getArchFlags() or "").split()
    built = [int(name.removeprefix("sm_")) for name in listed if name.startswith("sm_")]
    assert check_machine() == built != []


@pytest.mark.skipif(not LIBRARIES.is_dir(), reason="built without the virtual GPU")
def test_torch_sees_the_tables_gpu() -> None:
    """An A100, whose properties torch prints on the real one as written out here."""
    program = """
from opacus_memprof import virtual_gpu
virtual_gpu.start("a100-40")
import torch
p = torch.cuda.get_device_properties(0)
print(p.name, p.major, p.minor, p.multi_processor_count, p.total_memory, p.L2_cache_size, sep="|")
print(p.max_threads_per_multi_processor, p.shared_memory_per_multiprocessor, p.shared_memory_per_block_optin, sep="|")
"""
    command = [*interpreter(), "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    first, second = done.stdout.splitlines()
    assert first == "NVIDIA A100-SXM4-40GB|8|0|108|42298834944|41943040"
    assert second == "2048|167936|166912"


def test_memory_and_number_of_gpus_are_limited() -> None:
    context = 552468480 * (40 * 1024) // (132 * 2048)  # the H200's, by resident threads
    least, most = context + 2**28, 2**40
    assert process.smallest_memory("t4") == least
    assert [process.choose_gpu("t4", memory, 64).total_memory for memory in (least, most)] == [least, most]
    for memory, count in ((least - 1, 1), (most + 1, 1), (None, 65), (None, 0)):
        with pytest.raises(MemprofError):
            process.choose_gpu("t4", memory, count)


def test_a_gpu_of_amd_is_named_so_in_any_case() -> None:
    with pytest.raises(MemprofError, match='"MI300X" is a GPU of AMD'):
        process.choose_gpu("MI300X", None, 1)


@pytest.mark.parametrize(
    ("ranks", "gpus", "local"), [(16, None, 8), (12, None, 6), (7, None, 7), (13, None, 1), (16, 4, 4)]
)
def test_machines_have_equally_many_ranks(ranks: int, gpus: int | None, local: int) -> None:
    assert local_world_size(ranks, gpus) == local


def test_a_simulated_rank_has_torchruns_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert [check_ranks(ranks, 4) for ranks in ([3, 1, 3], [])] == [[1, 3], [0]]
    with pytest.raises(MemprofError, match="a job of 4 ranks has no rank 4"):
        check_ranks([4], 4)
    found = SimulatedRank(13, 24, 8).environment()
    numbers = {name: int(value) for name, value in found.items() if value.isdecimal() and name != "MASTER_PORT"}
    assert numbers.pop("ROLE_RANK") == numbers.pop("RANK") == 13
    assert numbers.pop("ROLE_WORLD_SIZE") == numbers.pop("WORLD_SIZE") == 24
    assert numbers == {"LOCAL_RANK": 5, "LOCAL_WORLD_SIZE": 8, "GROUP_RANK": 1}


def test_a_rendezvous_has_the_rank_of_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[str, Any] = {}
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(rendezvous, "_rendezvous_handlers", handlers)
    monkeypatch.setattr(simulated_rank, "_simulated", SimulatedRank(1, 4, 4))
    monkeypatch.setattr(simulated_rank, "_store", None)
    simulated_rank._replace_rendezvous()
    for url, expected in (("env://", (1, 4)), ("tcp://host:1?rank=3&world_size=8", (3, 8))):
        assert next(handlers[url[:3]](url))[1:] == expected


def test_a_store_acts_as_if_all_ranks_did_the_same() -> None:
    store = SingleRankStore(4)
    assert [store.add("count", 2), store.add("count", 1)] == [8, 12]
    store.set("host/0", "a")
    store.append("log", "b")
    store.append("log", "c")
    assert [store.get(key) for key in ("host/0", "host/7", "log", "new")] == [b"a", b"a", b"bc", b"\1" * 128]
    exchanged = [store.compare_set("key", *values) for values in (("", "x"), ("other", "y"), ("x", "z"))]
    assert exchanged == [b"x", b"x", b"z"]
    assert [store.check(keys) for keys in (["key", "log"], ["key", "gone"])] == [True, False]
    assert [store.delete_key("key"), store.delete_key("key")] == [True, False]


def test_the_end_waits_briefly_and_a_fork_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    states, sleeps = iter([True, False, True, False, False]), list[float]()
    monkeypatch.setattr(process, "_other_threads_run", lambda: next(states))
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=int, sleep=sleeps.append))
    process._wait(os.getpid() + 1)
    assert not sleeps
    process._wait(os.getpid())
    assert len(sleeps) == 5


@pytest.mark.parametrize(("stat", "state"), [("7 (python) S 1", "S"), ("7 (a) S) R 1", "R"), ("", "")])
def test_the_state_of_a_thread_is_read_after_its_name(stat: str, state: str, tmp_path: Path) -> None:
    (tmp_path / "stat").write_text(stat)
    assert process._state(tmp_path) == state


def test_inductor_s_cache_is_separate_also_in_children(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SimpleNamespace(default_cache_dir=lambda: "default")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "chosen")
    process._use_separate_cache(cache)
    process._use_separate_cache(SimpleNamespace(default_cache_dir=None))  # in a child
    assert (os.environ["TORCHINDUCTOR_CACHE_DIR"], cache.default_cache_dir()) == (
        "chosen_virtual_gpu",
        "default_virtual_gpu",
    )


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_simulated_rank_gathers_copies_of_its_object(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(collectives, "_simulates_one_rank", lambda: True)
    monkeypatch.setattr(collectives, "_count_rank_read", lambda: read.append(ranks))
    names = [f"{name}_object" for name in ("all_gather", "gather")]
    names += [f"{name}_object_list" for name in ("broadcast", "scatter", "send", "recv")]
    c10d = SimpleNamespace(**dict.fromkeys(names, print), get_world_size=lambda group: ranks, get_rank=lambda group: 0)
    c10d._rank_not_in_group, c10d._group_or_default_group = lambda group: False, lambda group: "world"
    collectives._replace_object_collectives(c10d)
    found, own = [None] * ranks, {"a": [1]}
    c10d.all_gather_object(found, own)
    assert found == [own] * ranks
    assert len({id(each) for each in (*found, own)}) == ranks + 1
    assert len(read) == (ranks > 1)
