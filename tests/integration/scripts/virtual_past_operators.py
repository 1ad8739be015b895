# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: I001
"""More programs for virtual_programs.py, most of which write to a GPU's memory past torch's operators."""

import _thread
import ctypes
import sys
import tempfile
from collections.abc import Callable
from ctypes import c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

from virtual_programs import numbers, report, said  # before torch

import torch
from torch import nn
from torch.cuda import comm, nccl
from torch.multiprocessing.reductions import reduce_tensor
from torch.nn import functional

from opacus_memprof.errors import MemprofError

CUDA = ctypes.CDLL(None)
PROGRAMS: dict[str, Callable[[str], Any]] = {}


def program(function: Callable[[str], Any]) -> Callable[[str], Any]:
    PROGRAMS[function.__name__] = function
    return function


def at(tensor: torch.Tensor) -> c_void_p:
    return c_void_p(tensor.data_ptr())


def call(name: str, *arguments: Any) -> None:
    status = getattr(CUDA, name)(*arguments)
    assert status == 0, status


class Array:
    """Four floats at an address, as other libraries hand them over."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (address, False), "version": 3}


def unknown(device: str) -> torch.Tensor:
    return torch.rand(1000, 1000, device=device).clamp(3, 3).mean()


def triple(value: torch.Tensor) -> None:
    """By a kernel of the program's own, in place."""
    source = 'extern "C" __global__ void triple(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 3; }'
    kernel = torch.cuda._compile_kernel(source, "triple")
    kernel(grid=(1, 1, 1), block=(32, 1, 1), args=[value, value.numel()])


@program
def copy_of_what_is_unknown(device: str) -> Any:
    value, copy = unknown(device), torch.zeros((), device=device)
    if device == "cpu":
        return value
    call("cudaMemcpy", at(copy), at(value), c_size_t(4), 3)
    return copy


@program
def unknown_copy_to_the_host(device: str) -> Any:
    value, copy = unknown(device), torch.zeros(())
    if device == "cpu":
        return value
    call("cudaMemcpy", at(copy), at(value), c_size_t(4), 2)
    return copy


@program
def copies_of_bytes(device: str) -> Any:
    value, host, part = numbers(device, 4, 6), numbers("cpu", 4) * 2, torch.zeros(4, 3, device=device)
    if device == "cpu":
        return [value[:, :3], host, host]
    new, back = torch.empty(4, device=device), torch.zeros(4)
    call("cudaMemcpy2D", at(part), c_size_t(12), at(value), c_size_t(24), c_size_t(12), c_size_t(4), 3)
    call("cudaMemcpyAsync", at(new), at(host), c_size_t(16), 1, c_void_p(0))
    call("cuMemcpyDtoH_v2", at(back), at(new), c_size_t(16))
    return [part, new, back]


@program
def fills(device: str) -> Any:
    large, small, words = (
        torch.ones(1 << 20, device=device),
        torch.ones(1000, device=device),
        torch.ones(8, device=device),
    )
    if device == "cpu":
        return [0, 0, torch.full((8,), 2.5)]
    call("cudaMemset", at(large), 0, c_size_t(4 << 20))
    call("cudaMemsetAsync", at(small), 0, c_size_t(4000), c_void_p(0))
    call("cuMemsetD32_v2", at(words), c_uint(0x40200000), c_size_t(8))
    return [large[5].long(), small.sum().long(), words]


@program
def copy_in_a_graph(device: str) -> Any:
    value, copy = numbers(device, 4), torch.zeros(4, device=device)
    if device == "cpu":
        return [value + 1, value + 2]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value += 1
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        call("cudaMemcpyAsync", at(copy), at(value), c_size_t(16), 3, stream)
    found = []
    for _ in range(2):
        graph.replay()
        found.append(copy.clone())
    return found


@program
def memory_of_host_and_device(device: str) -> Any:
    host = numbers("cpu", 4)
    if device == "cpu":
        return [host, host + 1]
    shared = c_void_p()
    call("cudaMallocManaged", ctypes.byref(shared), c_size_t(16), 1)
    (ctypes.c_float * 4).from_address(shared.value or 0)[:] = host.tolist()
    pinned = host.pin_memory()
    torch.as_tensor(Array(pinned.data_ptr()), device=device).add_(1)
    return [torch.as_tensor(Array(shared.value or 0), device=device), pinned]


@program
def kernel_in_place(device: str) -> Any:
    value, other, weight = numbers(device, 8), numbers(device, 8), numbers(device, 300, 300)
    if device == "cpu":
        return value * 3
    triple(value)
    before = said()
    assert torch.equal(other.cpu(), numbers("cpu", 8))
    assert torch.equal(weight.cpu(), numbers("cpu", 300, 300))
    assert said() == before
    return value


@program
def kernel_in_a_graph(device: str) -> Any:
    value, graph = numbers(device, 8), torch.cuda.CUDAGraph() if device == "cuda" else None
    if graph is None:
        return value * 3
    with torch.cuda.graph(graph):
        triple(value)
    before = said()
    assert torch.equal(value.cpu(), numbers("cpu", 8))  # it has not run yet
    assert said() == before
    graph.replay()
    return value


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        value.mul_(2)
        return value + self.count


@program
def compiled_ahead_of_time(device: str) -> Any:
    model, value = Counting().to(device), numbers(device, 4)
    if device == "cpu":
        return [model(value), value]
    exported = torch.export.export(model, (numbers(device, 4),))
    with tempfile.TemporaryDirectory() as folder:
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(Path(folder, "model.pt2")))
        return [torch._inductor.aoti_load_package(package)(value), value]


@program
def thread_without_threading(device: str) -> Any:
    found: list[float] = []
    done = _thread.allocate_lock()
    done.acquire()

    def work() -> None:
        found.append((numbers(device, 5) * 2 + 1).sum().item())
        done.release()

    _thread.start_new_thread(work, ())
    done.acquire()
    return found


@program
def graphs_of_one_pool(device: str) -> Any:
    value, found = torch.ones(4, device=device), []
    if device == "cpu":
        return [each for step in range(3) for each in (torch.full((4,), 2.0 * step), torch.full((4,), 2.0 * step + 1))]
    pool, first, second = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first, pool=pool):
        doubled = value * 2
    with torch.cuda.graph(second, pool=pool):
        more = doubled + 1
    for step in range(3):
        value.fill_(step)
        first.replay()
        second.replay()
        found += [doubled.clone(), more.clone()]
    return found


@program
def first_replay_over_memory_that_was_freed(device: str) -> Any:
    value = numbers(device, 4)
    if device == "cpu":
        return [value * 2 + 1]
    first, graph, pool = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    with torch.cuda.graph(first, pool=pool):
        given = torch.empty_like(value)
    given.copy_(value)
    kept = torch.as_tensor(Array(given.data_ptr()), device=device)
    with torch.cuda.graph(graph, pool=pool):
        doubled = kept * 2
        del given, first  # what follows may get its memory
        result = doubled + 1
    graph.replay()
    return [result]


@program
def compiled_into_graphs(device: str) -> Any:
    layer = nn.Linear(3, 2).to(device)
    for parameter in layer.parameters():
        parameter.data.copy_(numbers(device, *parameter.shape))
    function = torch.compile(layer, backend="cudagraphs") if device == "cuda" else layer
    found = []
    for step in range(4):
        loss = function(numbers(device, 5, 3) * step).pow(2).mean()
        (gradient,) = torch.autograd.grad(loss, layer.weight)
        found += [loss.item(), gradient.clone()]  # what it has computed is overwritten by the next
    return found


@program
def graph_that_is_printed(device: str) -> Any:
    value = numbers(device, 3)
    if device == "cpu":
        return value + 1
    graph = torch.cuda.CUDAGraph()
    graph.enable_debug_mode()
    with torch.cuda.graph(graph):
        result = value + 1
    with tempfile.TemporaryDirectory() as folder:
        graph.debug_dump(f"{folder}/graph.dot")
        text = Path(folder, "graph.dot").read_text()
    assert text.startswith("digraph"), text
    assert "node_0" in text
    graph.replay()
    return result


@program
def copies_of_lists_into_new_memory(device: str) -> Any:
    given = [numbers(device, 3), numbers(device, 2, 2)]
    copies = [torch.empty_like(each) for each in given]
    torch._foreach_copy_(copies, given)
    zeros = [torch.empty(5, device=device)]
    torch._foreach_zero_(zeros)
    return [*copies, *zeros]


@program
def collectives_of_two_gpus_in_one_process(device: str) -> Any:
    def given() -> list[torch.Tensor]:  # which differ
        return [numbers("cpu", 4), numbers("cpu", 4) * 5 + 1]

    first, second = given()
    if device == "cpu":
        everything = torch.cat([first, second])
        return [*[first + second] * 3, torch.maximum(first, second), first, everything, (first + second)[2:]]
    there = [each.to(f"cuda:{index}") for index, each in enumerate(given())]
    new = [torch.empty(8, device=each.device) for each in there]
    found = [comm.reduce_add(there, 0)]
    nccl.all_gather(there, new)
    parts = [torch.empty(2, device=each.device) for each in there]
    nccl.reduce_scatter(there, parts)
    summed = [each.clone() for each in there]
    nccl.all_reduce(summed)
    largest = [each.clone() for each in there]
    nccl.all_reduce(largest, op=2)  # ncclMax
    copies = comm.broadcast(there[0], [0, 1])
    return [*found, *summed, largest[1], copies[1], new[1], parts[1]]


@program
def data_parallel(device: str) -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    for parameter in model.parameters():
        parameter.data.copy_(numbers(device, *parameter.shape) / 5)
    parallel = nn.DataParallel(model) if device == "cuda" else model
    loss = parallel(numbers(device, 6, 3)).pow(2).sum()
    loss.backward()
    return [loss, [parameter.grad for parameter in model.parameters()]]


@program
def tensors_for_other_processes(device: str) -> Any:
    try:
        return len(reduce_tensor(numbers(device, 3))) == 2
    except MemprofError as error:
        return "send it on the CPU (tensor.cpu())" in str(error)


@program
def training_in_a_graph(device: str) -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).to(device)
    for parameter in model.parameters():
        parameter.data.copy_(numbers(device, *parameter.shape) / 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, capturable=device == "cuda")
    for parameter in model.parameters():
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros((), device=device), **moments}
    value, loss = numbers(device, 5, 3), torch.zeros((), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        found = model(value).pow(2).mean()
        found.backward()
        optimizer.step()
        loss.copy_(found.detach())

    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        step = graph.replay
    losses = []
    for scale in range(4):
        value.copy_(numbers(device, 5, 3) * scale)
        step()
        losses.append(loss.clone())
    return losses


@program
def first_steps_of_fused_optimizers(device: str) -> Any:
    found = []
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad):
        weight = nn.Parameter(numbers(device, 2, 3))
        optimizer = kind([weight], lr=0.1, fused=True, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))  # type: ignore[arg-type]
        for _ in range(3):
            optimizer.zero_grad()
            functional.linear(numbers(device, 4, 3), weight).pow(2).sum().backward()
            optimizer.step()
        found.append(weight)
    return found


@program
def results_that_are_arguments(device: str) -> Any:
    matrix = numbers(device, 4, 4) + torch.eye(4, device=device) * 5
    return [
        torch.linalg.lstsq(matrix, numbers(device, 4, 2))[0],
        torch.cummax(numbers(device, 6).flip(0), 0),
        torch.cummin(numbers(device, 6), 0),
        functional.logsigmoid(numbers(device, 5)),
        torch.func.grad(lambda value: functional.logsigmoid(value).sum())(numbers(device, 5)),
    ]


if __name__ == "__main__":
    report({name: PROGRAMS[name] for name in sys.argv[1:] or PROGRAMS})
