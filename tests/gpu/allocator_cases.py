# SPDX-License-Identifier: Apache-2.0
"""What programs may rely on in torch's CUDA allocator, a case each: `main` prints what each returned, or raised.

The cases are those of torch's own tests of its allocator, as far as they need one GPU and no kernel's result.
"""

import contextlib
import gc
import json
import os
from collections.abc import Callable
from typing import Any

import torch

import opacus_memprof

MIB = 2**20
CASES: list[Callable[[], Any]] = []


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES.append(function)
    return function


def made(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def stats(*names: str) -> list[int]:
    found = torch.cuda.memory_stats()
    return [found[name] for name in names]


def allocated_since(before: int) -> int:
    return torch.cuda.memory_allocated() - before


@case
def requests_are_rounded_to_512_bytes() -> list[int]:
    before, sizes = torch.cuda.memory_allocated(), []
    for size in (1, 511, 512, 513, MIB, MIB + 1, 30 * MIB + 7):
        kept = made(size)
        sizes.append(allocated_since(before))
        del kept
    return [*sizes, allocated_since(before)]


@case
def a_freed_block_is_handed_out_again() -> bool:
    first = made(3 * MIB)
    address = first.data_ptr()
    del first
    return made(3 * MIB).data_ptr() == address


@case
def a_block_is_split_and_merged() -> list[int]:
    whole = made(20 * MIB)
    del whole
    parts = [made(2 * MIB) for _ in range(5)]
    split = stats("inactive_split.all.current", "segment.all.current")
    del parts[::2]
    torn = stats("inactive_split.all.current", "segment.all.current")
    del parts
    return [*split, *torn, *stats("inactive_split.all.current", "segment.all.current")]


@case
def empty_cache_gives_segments_back() -> list[int]:
    kept = [made(size) for size in (10, 3 * MIB, 50 * MIB)]
    reserved = [torch.cuda.memory_reserved()]
    del kept[2]
    torch.cuda.empty_cache()
    reserved.append(torch.cuda.memory_reserved())
    kept.clear()
    torch.cuda.empty_cache()
    return [*reserved, torch.cuda.memory_reserved()]


@case
def peaks_are_reset() -> list[int]:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = made(5 * MIB)
    del kept
    highest = torch.cuda.max_memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    return [highest, torch.cuda.max_memory_allocated() - before]


@case
def allocations_are_counted() -> list[int]:
    torch.cuda.reset_accumulated_memory_stats()
    for _ in range(7):
        made(1000)
    return stats("allocation.all.allocated", "allocation.all.freed", "requested_bytes.all.allocated")


@case
def too_large_a_request_says_so() -> list[Any]:
    ooms = stats("num_ooms")[0]
    try:
        made(1 << 60)
    except torch.OutOfMemoryError as error:
        return [str(error).splitlines()[0].split(".")[0], stats("num_ooms")[0] - ooms]
    return []


@case
def a_fraction_of_the_device_is_the_limit() -> list[bool]:
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        fits = made(total // 5)
        del fits
        torch.cuda.empty_cache()
        try:
            made(total // 3)
        except torch.OutOfMemoryError:
            return [True, torch.cuda.get_per_process_memory_fraction() == 0.25]
        return [False]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@case
def a_failed_request_is_tried_again_without_the_cache() -> list[int]:
    total = torch.cuda.mem_get_info()[1]
    half = int(total * 0.55)
    cached = made(half)
    del cached
    retries = stats("num_alloc_retries")[0]
    larger = made(half + 10 * MIB)
    del larger
    torch.cuda.empty_cache()
    return [stats("num_alloc_retries")[0] - retries]


@case
def raw_blocks_are_counted() -> list[int]:
    before = torch.cuda.memory_allocated()
    address = torch.cuda.caching_allocator_alloc(10_000)
    raw = [allocated_since(before)]
    torch.cuda.caching_allocator_delete(address)
    return [*raw, allocated_since(before)]


@case
def another_streams_use_delays_a_block() -> list[int]:
    side = torch.cuda.Stream()
    kept = made(7 * MIB)
    with torch.cuda.stream(side):
        torch.cuda._sleep(1000)
        kept.record_stream(side)
    before = torch.cuda.memory_allocated()
    del kept
    active = stats("active_bytes.all.current")[0]
    torch.cuda.synchronize()
    made(100)  # the next request looks for what is done
    return [before - torch.cuda.memory_allocated(), active > 0]


@case
def blocks_belong_to_their_stream() -> list[bool]:
    first = made(3 * MIB)
    address = first.data_ptr()
    del first
    with torch.cuda.stream(torch.cuda.Stream()):
        other = made(3 * MIB)
    return [other.data_ptr() == address, made(3 * MIB).data_ptr() == address]


@case
def a_snapshot_lists_blocks() -> list[Any]:
    kept = [made(size) for size in (10, 4 * MIB)]
    found = sorted(
        (block["requested_size"], block["state"])
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"].startswith("active") and block["address"] in {each.data_ptr() for each in kept}
    )
    return [list(each) for each in found]


@case
def the_history_has_what_was_done() -> list[str]:
    torch.cuda.memory._record_memory_history(context=None)
    try:
        kept = made(6 * MIB)
        address = kept.data_ptr()
        del kept
        (trace,) = torch.cuda.memory._snapshot()["device_traces"][:1]
        return [entry["action"] for entry in trace if entry["addr"] == address]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


@case
def observers_see_a_failure() -> list[int]:
    seen: list[int] = []
    torch._C._cuda_attach_out_of_memory_observer(lambda device, request, total, free: seen.append(request))
    with contextlib.suppress(torch.OutOfMemoryError):
        made(1 << 59)
    return seen[:1]


@case
def a_pool_has_segments_of_its_own() -> list[Any]:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = made(3 * MIB)
    outside = made(3 * MIB)
    addresses = [segment["address"] for segment in pool.snapshot()]
    found = [len(addresses), addresses[0] == inside.data_ptr(), outside.data_ptr() in addresses]
    del inside, outside
    return [*found, pool.use_count()]


@case
def a_captured_graph_keeps_its_pool() -> list[Any]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.memory_allocated()
    with torch.cuda.graph(graph):
        kept = made(4 * MIB)
        kept.zero_()
        made(2 * MIB).zero_()
    graph.replay()
    torch.cuda.synchronize()
    inside = allocated_since(before)
    pools = {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}
    is_there = tuple(graph.pool()) in pools
    del kept
    graph.reset()
    return [inside, is_there, allocated_since(before)]


@case
def a_storage_is_resized() -> list[int]:
    before = torch.cuda.memory_allocated()
    kept = made(1000)
    kept.untyped_storage().resize_(5 * MIB)
    sizes = [allocated_since(before)]
    kept.untyped_storage().resize_(0)
    return [*sizes, allocated_since(before)]


def main() -> None:
    """Prints a line for torch's own allocator, and for ours in both ways; each is in a fork before CUDA is begun."""
    for how in ("native", "install", "current"):
        child = os.fork()
        if child == 0:
            print(json.dumps(outcomes(how)), flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, how


def outcomes(how: str) -> dict[str, Any]:
    """What each case returned or raised, by name."""
    if how == "install":
        opacus_memprof.install("cuda")
    elif how == "current":
        torch.cuda.memory.change_current_allocator(opacus_memprof.allocator())
    found = {}
    for function in CASES:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        try:
            found[function.__name__] = function()
        except Exception as error:
            found[function.__name__] = f"{type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    main()
