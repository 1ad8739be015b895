# SPDX-License-Identifier: Apache-2.0
"""The delegating allocator on a GPU: everything behaves as with torch's own, and every byte is known."""

import gc
import threading
from collections.abc import Callable

import pytest
import torch

from opacus_memprof import virtual_gpu
from opacus_memprof.recording import native
from tests.gpu.ledger import assert_reconciled, block_of, live_bytes, requested_bytes

pytestmark = pytest.mark.usefixtures("recording")


def some_work() -> None:
    """Small and large blocks, splits, frees in another order, a resize, a clone, a matrix product."""
    kept = [torch.empty(size, device="cuda") for size in (1, 127, 128, 1000, 300_000, 5_000_000)]
    del kept[1::2]
    kept.append(torch.randn(512, 512, device="cuda") @ torch.randn(512, 512, device="cuda"))
    kept.append(kept[0].clone())
    kept[0].resize_(70_000)
    torch.cuda.synchronize()


def figures(work: Callable[[], None]) -> dict[str, int]:
    """What memory_stats says that `work` did, from a clean start."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    before = torch.cuda.memory_stats()
    work()
    after = torch.cuda.memory_stats()
    return {key: value - before[key] for key, value in after.items() if not key.startswith("num_alloc_retries")}


def test_memory_stats_equal_those_of_the_native_allocator() -> None:
    some_work()  # libraries make their handles and workspaces
    ours = figures(some_work)
    native.cuda_uninstall()
    torchs_own = figures(some_work)
    assert ours == torchs_own
    assert torchs_own["allocation.all.allocated"] > 8


def test_snapshot_equals_that_of_the_native_allocator() -> None:
    def shape() -> list[tuple[int, list[tuple[int, str]]]]:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        in_use = [torch.empty(size, device="cuda") for size in (10, 1000, 4_000_000)]
        segments = torch.cuda.memory_snapshot()
        del in_use
        return sorted((s["total_size"], [(b["requested_size"], b["state"]) for b in s["blocks"]]) for s in segments)

    ours = shape()
    native.cuda_uninstall()
    assert ours == shape()


def test_every_allocation_and_free_is_seen() -> None:
    before = live_bytes()
    tensors = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (1, 511, 512, 513, 10_000_001)]
    assert live_bytes() - before == 1 + 511 + 512 + 513 + 10_000_001
    assert_reconciled()
    del tensors
    assert live_bytes() == before
    assert_reconciled()


def test_raw_interface_is_seen() -> None:
    before = live_bytes()
    pointer = torch.cuda.caching_allocator_alloc(12345)
    assert live_bytes() - before == 12345
    assert_reconciled()
    torch.cuda.caching_allocator_delete(pointer)
    assert live_bytes() == before


def test_an_address_that_is_handed_out_again_at_once() -> None:
    torch.empty(1000, device="cuda")  # the block that every round reuses
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            torch.empty(1000, device="cuda")

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        torch.empty(1000, device="cuda")
        native.live_blocks()
    stop.set()
    for thread in threads:
        thread.join()
    assert_reconciled()


@pytest.mark.true_numbers
def test_record_stream_keeps_memory_until_the_side_stream_is_done() -> None:
    side = torch.cuda.Stream()
    source = torch.full((1 << 22,), 7.0, device="cuda")
    with torch.cuda.stream(side):
        source + 0  # loading a kernel waits for the device, so it is done before
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(400_000_000)  # about a fifth of a second
        read_late = source + 0
    source.record_stream(side)
    del source
    # The block would be handed out again here, and the side stream would read the new values.
    overwriting = [torch.full((1 << 22,), -1.0, device="cuda") for _ in range(4)]
    waiting = native.cuda_refresh(0)
    assert waiting == 4 << 22
    assert_reconciled()
    torch.cuda.synchronize()
    assert read_late.eq(7.0).all()
    del overwriting


def test_cuda_graph_capture_and_replay() -> None:
    static = torch.zeros(1 << 16, device="cuda")
    weight = torch.randn(256, 256, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        (static.view(256, 256) @ weight).relu()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = (static.view(256, 256) @ weight).relu() * 2
    assert_reconciled()
    for value in (1.0, -3.0):
        static.fill_(value)
        graph.replay()
        expected = (torch.full((256, 256), value, device="cuda") @ weight).relu() * 2
        if virtual_gpu.active() is None:
            torch.testing.assert_close(result, expected)
    del graph, result
    assert_reconciled()


def test_mem_pool() -> None:
    before = live_bytes()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = torch.empty(3_000_000, dtype=torch.uint8, device="cuda")
    assert live_bytes() - before == 3_000_000
    assert sum(segment["allocated_size"] for segment in pool.snapshot()) >= 3_000_000
    assert_reconciled()
    del inside, pool
    assert live_bytes() == before


def test_empty_cache_returns_memory() -> None:
    large = torch.empty(200_000_000, dtype=torch.uint8, device="cuda")
    del large
    assert torch.cuda.memory_reserved() >= 200_000_000
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < 200_000_000


def test_out_of_memory_raises_torchs_error_and_leaves_everything_usable() -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory. Tried to allocate .* GiB") as caught:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    assert "GPU 0 has a total capacity of" in str(caught.value)
    assert torch.ones(3, device="cuda").sum().item() == 3
    assert_reconciled()


def test_memory_history_on_top() -> None:
    torch.cuda.memory._record_memory_history(max_entries=1000)
    try:
        in_use = torch.empty(123_456, dtype=torch.uint8, device="cuda")
        entries = torch.cuda.memory._snapshot()["device_traces"][0]
        sizes = [entry["size"] for entry in entries if entry["action"] == "alloc"]
        assert 123_456 in sizes
        del in_use
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def test_late_attach_seeds_blocks_and_detach_keeps_tensors_valid() -> None:
    native.cuda_uninstall()
    before = torch.empty(1_000_000, dtype=torch.uint8, device="cuda")
    adopted = torch.empty(2_000_000, dtype=torch.uint8, device="cuda")
    native.cuda_install()
    assert block_of(before)["seeded"]
    assert_reconciled()
    native.retag(adopted, native.category_id("model_parameters"))
    assert not block_of(adopted)["seeded"]
    address = adopted.untyped_storage().data_ptr()
    del adopted  # through our deleter now: seen at once
    assert address not in {block["address"] for block in native.live_blocks()}
    del before  # through the native deleter: seen at the next look
    assert_reconciled()
    during = torch.full((1000,), 5.0, device="cuda")
    native.cuda_uninstall()
    assert during.sum().item() == 5000
    del during
    torch.empty(1000, device="cuda")
    native.cuda_install()
    assert_reconciled()


def test_backward_thread_is_known() -> None:
    weight = torch.randn(64, 64, device="cuda", requires_grad=True)
    seen: dict[str, object] = {}

    def hook(gradient: torch.Tensor) -> None:
        seen.update(block_of(gradient))

    product = torch.randn(8, 64, device="cuda") @ weight
    product.register_hook(hook)
    product.relu().sum().backward()
    assert seen["phase"] == "backward"
    assert seen["thread"] == "pt_autograd_0"


def test_cublas_workspaces_have_their_category() -> None:
    handle_users = [threading.Thread(target=some_work) for _ in range(2)]
    for thread in handle_users:
        thread.start()
    for thread in handle_users:
        thread.join()
    workspaces = [block for block in native.live_blocks() if block["category"] == "library_workspace"]
    tensors = torch.randn(64, 64, device="cuda")
    assert block_of(tensors)["category"] != "library_workspace"
    tensors.resize_(1 << 20)
    assert block_of(tensors)["category"] != "library_workspace"
    if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
        torch._C._cuda_clearCublasWorkspaces()
        assert not [b for b in native.live_blocks() if b["category"] == "library_workspace" and b in workspaces]


def test_each_attach_seeds_its_blocks_anew() -> None:
    """Freed while nobody looked, and its address in use again, for other sizes."""
    native.cuda_uninstall()
    before = [torch.zeros(1000, device="cuda") for _ in range(8)]
    native.cuda_install()
    assert all(block_of(tensor)["seeded"] for tensor in before)
    native.cuda_uninstall()
    addresses = {tensor.data_ptr() for tensor in before}
    before.clear()
    again = [torch.zeros(900, device="cuda") for _ in range(4)]
    assert {tensor.data_ptr() for tensor in again} <= addresses
    native.cuda_install()
    assert all(block_of(tensor)["bytes"] == 3600 for tensor in again)
    requested = torch.cuda.memory_stats()["requested_bytes.all.current"]
    assert sum(block["bytes"] for block in native.live_blocks() if block["device"] == "cuda:0") == requested


@pytest.mark.skipif(torch.__version__ >= "2.12", reason="workspaces of this torch live for one operation")
def test_workspaces_from_before_a_late_attach_have_their_category() -> None:
    native.cuda_uninstall()
    other = threading.Thread(target=some_work)
    other.start()
    some_work()
    other.join()  # what it freed later would be seen at the next look only, in another test
    torch.cuda.synchronize()
    native.cuda_install()
    large = [block for block in native.live_blocks() if block["bytes"] >= 8 << 20]
    assert {block["category"] for block in large} == {"library_workspace"}


def test_the_peak_is_the_allocators_own() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    native.cuda_refresh(0)
    torch.cuda.reset_peak_memory_stats()
    native.reset_peaks()
    some_work()
    peak = native.peaks()["cuda:0"]
    stats = torch.cuda.memory_stats()
    assert peak["requested_bytes"] == stats["requested_bytes.all.peak"]
    assert peak["upstream_requested_bytes"] == peak["requested_bytes"]
    assert sum(peak["categories"].values()) == peak["requested_bytes"]
    assert requested_bytes() <= peak["requested_bytes"] <= peak["allocated_bytes"] <= peak["reserved_bytes"]
