# SPDX-License-Identifier: Apache-2.0
"""What needs a process of its own: settings that torch reads once, exits, IPC, compiled CUDA graphs."""

import subprocess
import textwrap

import pytest

from opacus_memprof import virtual_gpu
from tests.on_virtual_gpu import interpreter
from tests.warm_python import ENVIRONMENT

PRELUDE = """
import torch, opacus_memprof
from opacus_memprof.recording import native
from tests.gpu.ledger import assert_reconciled, live_bytes
"""


def run(code: str, **environment: str) -> str:
    finished = subprocess.run(
        [*interpreter(), "-c", PRELUDE + textwrap.dedent(code)],
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "Error" not in finished.stderr
    assert "terminate called" not in finished.stderr
    return finished.stdout


def test_change_current_allocator() -> None:
    run("""
        torch.cuda.memory.change_current_allocator(opacus_memprof.allocator())
        tensor = torch.ones(1000, device="cuda")
        assert live_bytes() == 4000 == torch.cuda.memory_stats()["requested_bytes.all.current"]
        assert torch.cuda.memory.get_allocator_backend() == "native"
    """)


def test_exit_with_live_tensors_does_not_abort() -> None:
    assert "alive" in run("""
        opacus_memprof.install()
        kept = torch.ones(1000, device="cuda", requires_grad=True)
        graph = (kept * 2).sum()
        import builtins; builtins.kept_forever = [kept, graph]
        print("alive")
    """)


def test_expandable_segments() -> None:
    run(
        """
        opacus_memprof.install()
        tensors = [torch.empty(30_000_000, dtype=torch.uint8, device="cuda") for _ in range(5)]
        assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
        assert_reconciled()
        del tensors[::2]
        assert_reconciled()
        """,
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )


@pytest.mark.parametrize("mode", ["reduce-overhead"])
def test_compiled_cuda_graph_trees(mode: str) -> None:
    """Graph trees restore pool states: blocks come back to life and die without allocate() or a deleter."""
    computes = virtual_gpu.active() is None
    run(f"""
        opacus_memprof.install()
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
        compiled = torch.compile(model, mode={mode!r})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            batch = torch.randn(16 if step % 2 else 32, 64, device="cuda")
            expected = model(batch)
            result = compiled(batch)
            if {computes}:
                torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)
            result.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            del result, expected
            assert_reconciled()
    """)


def test_a_child_that_is_forked_after_install_can_use_cuda() -> None:
    run("""
        import os

        opacus_memprof.install()
        child = os.fork()
        if child == 0:
            os._exit(int(torch.ones(3, device="cuda").sum().item()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert torch.ones(3, device="cuda").sum().item() == 3
        assert_reconciled()
    """)


@pytest.mark.skipif(virtual_gpu.active() is not None, reason="no process sees another one's virtual GPU")
def test_ipc_between_two_processes() -> None:
    run("""
        import torch.multiprocessing as multiprocessing

        def child(queue, done):
            tensor = queue.get()
            assert tensor.sum().item() == 3000
            tensor += 1
            torch.cuda.synchronize()
            del tensor
            done.put(True)

        opacus_memprof.install()
        context = multiprocessing.get_context("fork")
        # The child must not inherit an initialised CUDA, so it starts first.
        queue, done = context.Queue(), context.Queue()
        process = context.Process(target=child, args=(queue, done))
        process.start()
        shared = torch.full((1000,), 3.0, device="cuda")
        queue.put(shared)
        assert done.get(timeout=120)
        process.join(60)
        assert process.exitcode == 0
        assert shared.sum().item() == 4000
        assert_reconciled()
    """)


def test_plug_in_entry_points() -> None:
    run("""
        plug_in = torch.cuda.memory.CUDAPluggableAllocator(
            opacus_memprof.library_path(), "opacus_memprof_malloc", "opacus_memprof_free")
        torch.cuda.memory.change_current_allocator(plug_in)
        noise = native.Tag(category=native.category_id("noise"))
        with noise:
            tensor = torch.ones(1000, device="cuda")
        assert tensor.sum().item() == 1000
        counters = native.snapshot("now")["devices"]["cuda:0"]["categories"]
        assert counters["noise"] == 4000
        del tensor
        assert native.snapshot("later")["devices"]["cuda:0"]["categories"]["noise"] == 0
        try:
            torch.empty(1 << 60, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            pass
        (failure,) = native.failures()
        assert failure["requested"] == 1 << 60
    """)


def test_without_caching_the_run_goes_on_and_blocks_are_known() -> None:
    run(
        """
        opacus_memprof.install()
        tensor = torch.ones(1000, device="cuda")
        assert native.snapshot("now")["devices"]["cuda:0"]["requested_bytes"] == 4000
        del tensor
        assert native.snapshot("later")["devices"]["cuda:0"]["requested_bytes"] == 0
        """,
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
    )


def test_cuda_malloc_async_backend() -> None:
    run(
        """
        opacus_memprof.install()
        assert torch.cuda.memory.get_allocator_backend() == "cudaMallocAsync"
        tensor = torch.ones(1 << 20, device="cuda")
        assert native.snapshot("now")["devices"]["cuda:0"]["requested_bytes"] == 4 << 20
        del tensor
        assert native.snapshot("later")["devices"]["cuda:0"]["requested_bytes"] == 0
        """,
        PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync",
        PYTORCH_ALLOC_CONF="backend:cudaMallocAsync",
    )


def test_an_earlier_foreign_allocator_is_wrapped_or_refused() -> None:
    run("""
        first = torch.empty(10, device="cuda")
        opacus_memprof.install()
        opacus_memprof.uninstall()
        plug_in = torch.cuda.memory.CUDAPluggableAllocator(
            opacus_memprof.library_path(), "opacus_memprof_malloc", "opacus_memprof_free")
        try:
            torch.cuda.memory.change_current_allocator(plug_in)
        except RuntimeError as error:
            assert "already initialized" in str(error)
    """)
