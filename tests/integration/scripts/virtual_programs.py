# SPDX-License-Identifier: Apache-2.0
"""Programs that use a GPU in many ways, on the virtual GPU and on the CPU. Prints what differs and what is said."""

import json
from collections.abc import Callable
from typing import Any

from opacus_memprof import virtual_gpu

virtual_gpu.start("h200", count=2)

import torch  # noqa: E402
from torch import nn  # noqa: E402

from opacus_memprof.virtual_gpu import values  # noqa: E402

PROGRAMS: dict[str, Callable[[str], Any]] = {}


def program(function: Callable[[str], Any]) -> Callable[[str], Any]:
    PROGRAMS[function.__name__] = function
    return function


def numbers(device: str, *shape: int) -> torch.Tensor:
    return torch.linspace(-2, 3, torch.Size(shape).numel()).reshape(shape).to(device)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(value)
        return value * 2

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (value,) = context.saved_tensors
        return gradient * 2 + value.sum()


@program
def views_in_place(device: str) -> Any:
    whole = numbers(device, 4, 6)
    whole[1:3, ::2].mul_(3).add_(1)
    whole.t()[0].zero_()
    whole.view(-1)[5:9] = 7
    return whole


@program
def own_autograd_function(device: str) -> Any:
    value = numbers(device, 5).requires_grad_()
    Doubled.apply(value).pow(2).sum().backward()
    return value.grad


@program
def loop_until(device: str) -> Any:
    value, steps = torch.tensor(1.0, device=device), 0
    while value < 100:
        value, steps = value * 1.7, steps + 1
    return [steps, value.item()]


@program
def unique_and_counts(device: str) -> Any:
    found, inverse, counts = torch.unique(
        torch.tensor([3, 1, 3, 2, 1], device=device), return_inverse=True, return_counts=True
    )
    return [found, inverse, counts]


@program
def masks(device: str) -> Any:
    value = numbers(device, 3, 4)
    value[value < 0] = 0
    return [torch.nonzero(value), value.masked_select(value > 1), torch.where(value > 1)[1], value[value.bool()]]


@program
def sorting(device: str) -> Any:
    value = torch.tensor([3.0, -1, 7, 2], device=device)
    return [value.sort(descending=True), value.topk(2), value.argsort(), value.kthvalue(2), value.median()]


@program
def histograms(device: str) -> Any:
    value = torch.tensor([1, 5, 1, 2], device=device)
    bounds = torch.tensor([1, 3], device=device)
    return [value.bincount(), torch.histc(value.float(), 4), torch.bucketize(value, bounds), value.cumsum(0)]


@program
def copies(device: str) -> Any:
    host = torch.arange(6.0).pin_memory() if device == "cuda" else torch.arange(6.0)
    there = host.to(device, non_blocking=True)
    back = torch.empty(6).copy_(there, non_blocking=True)
    return [back, there.cpu().numpy().tolist(), there.tolist(), there.half().float()]


@program
def through_dlpack(device: str) -> Any:
    value = numbers(device, 3)
    torch.from_dlpack(value).add_(1)
    return value


@program
def foreach(device: str) -> Any:
    listed = [numbers(device, 2), numbers(device, 3)]
    torch._foreach_mul_(listed, 2)
    torch._foreach_add_(listed, listed, alpha=0.5)
    return [*listed, *torch._foreach_norm(listed)]


@program
def autocast_and_scaler(device: str) -> Any:
    model, value = nn.Linear(4, 2).to(device), numbers(device, 3, 4)
    nn.init.constant_(model.weight, 0.5)
    nn.init.zeros_(model.bias)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler(device, init_scale=8.0)
    with torch.autocast(device, torch.bfloat16):
        loss = model(value).float().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return [model.weight, scaler.get_scale()]


def with_numbers(layer: nn.Module, device: str) -> Any:
    layer.to(device)
    for parameter in layer.parameters():
        parameter.data.copy_(numbers(device, *parameter.shape))
    return layer


@program
def recurrent(device: str) -> Any:
    found: list[Any] = []
    for kind, options in (
        (nn.GRU, {"batch_first": True}),
        (nn.LSTM, {"bidirectional": True, "num_layers": 2}),
        (nn.LSTM, {"proj_size": 2, "bias": False}),
        (nn.RNN, {"nonlinearity": "relu"}),
        (nn.RNN, {}),
    ):
        layer = with_numbers(kind(3, 4, **options), device)
        value = numbers(device, 5, 2, 3).requires_grad_()
        result, last = layer(value)
        result.pow(2).sum().backward()
        found += [result, last, value.grad, [parameter.grad for parameter in layer.parameters()]]
    packed = nn.utils.rnn.pack_padded_sequence(numbers(device, 2, 5, 3), torch.tensor([5, 2]), batch_first=True)
    result = nn.utils.rnn.pad_packed_sequence(layer(packed)[0])[0]
    with torch.no_grad():
        exact = layer(numbers(device, 5, 2, 3))[0]
        with torch.autocast(device, torch.bfloat16):
            difference = layer(numbers(device, 5, 2, 3))[0].float() - exact
    return [*found, result, bool(difference.abs().max() < 0.05)]


@program
def cells(device: str) -> Any:
    found: list[Any] = []
    for kind, bias in ((nn.LSTMCell, True), (nn.LSTMCell, False), (nn.GRUCell, True), (nn.GRUCell, False)):
        cell = with_numbers(kind(3, 4, bias=bias), device)
        state = numbers(device, 2, 4).requires_grad_()
        result = cell(numbers(device, 2, 3), (state, state.cos()) if kind is nn.LSTMCell else state)
        sum(each.pow(2).sum() for each in (result if isinstance(result, tuple) else [result])).backward()
        found += [result, state.grad, [parameter.grad for parameter in cell.parameters()]]
    return found


@program
def recurrent_dropout(device: str) -> Any:
    layer = with_numbers(nn.LSTM(3, 4, num_layers=2, dropout=0.5), device)
    bias = layer.bias_ih_l0

    def loss() -> Any:
        torch.manual_seed(1)
        return layer(numbers(device, 5, 2, 3))[0].sum()

    (gradient,) = torch.autograd.grad(loss(), bias)
    with torch.no_grad():
        bias[0] += 0.01
        above = loss()
        bias[0] -= 0.02
        slope = (above - loss()) / 0.02
        one, other = layer(numbers(device, 5, 2, 3))[0], layer(numbers(device, 5, 2, 3))[0]
    return [torch.allclose(slope, gradient[0], atol=1e-3, rtol=1e-2), torch.equal(one, other)]


COUNTING = torch.library.Library("counting", "DEF")
COUNTING.define("positive(Tensor x) -> Tensor")
COUNTING.impl("positive", lambda value: value[value > 0], "CPU")
COUNTING.impl("positive", lambda value: value.new_empty(0), "CUDA")  # as a kernel that counts what it has not computed


@program
def operators_of_other_libraries_that_count(device: str) -> Any:
    found = torch.ops.counting.positive(numbers(device, 9))
    return [found, len(found)]


@program
def what_kernels_assert(device: str) -> Any:
    found = []
    index = torch.tensor([7], device=device)
    for use in (
        lambda: numbers(device, 3)[index],
        lambda: nn.functional.embedding(index, numbers(device, 3, 2)),
        lambda: nn.functional.cross_entropy(numbers(device, 1, 3), index),
        lambda: torch.zeros(1, 3, device=device).scatter(1, index[None], 1.0),
        lambda: torch.multinomial(-torch.ones(2, device=device), 1),
        lambda: nn.functional.binary_cross_entropy(torch.full((2,), 1.5, device=device), torch.ones(2, device=device)),
        lambda: torch._assert_async(torch.tensor(False, device=device)),
        lambda: torch._assert_async(torch.tensor(True, device=device)),
    ):
        try:
            use()
            found.append(False)
        except (RuntimeError, IndexError) as error:
            found.append(device == "cpu" or str(error).startswith("CUDA error: device-side assert triggered"))
    return found


@program
def embedding_bag(device: str) -> Any:
    bag = nn.EmbeddingBag.from_pretrained(numbers("cpu", 6, 2), mode="mean").to(device)
    return bag(torch.tensor([1, 2, 4, 5, 0], device=device), torch.tensor([0, 2], device=device))


@program
def compiled_without_a_compiler(device: str) -> Any:
    found = []
    for backend in ("eager", "aot_eager"):
        function = torch.compile(lambda value: (value.sin() + 1).sum(0), backend=backend)
        value = numbers(device, 4, 2).requires_grad_()
        function(value).sum().backward()
        found.append(value.grad)
    return found


@program
def scripted(device: str) -> Any:
    return torch.jit.trace(lambda value: value.relu() * 2, numbers(device, 3))(numbers(device, 3))


@program
def linear_algebra(device: str) -> Any:
    matrix = torch.tensor([[4.0, 1], [1, 3]], device=device)
    return [
        torch.linalg.solve(matrix, matrix[0]),
        torch.linalg.inv(matrix),
        torch.linalg.det(matrix),
        torch.linalg.eigvalsh(matrix),
        torch.linalg.svdvals(matrix),
        torch.linalg.cholesky(matrix),
        torch.linalg.matrix_rank(matrix),
    ]


@program
def fourier(device: str) -> Any:
    return [torch.fft.rfft(numbers(device, 8)).abs(), torch.fft.ifft2(torch.fft.fft2(numbers(device, 4, 4))).real]


@program
def eight_bits(device: str) -> Any:
    return numbers(device, 6).to(torch.float8_e4m3fn).float()


@program
def functional_transforms(device: str) -> Any:
    def loss(weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return (weight * value).pow(2).sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    return [per_sample(numbers(device, 3), numbers(device, 4, 3)), torch.func.hessian(loss)(*[numbers(device, 2)] * 2)]


@program
def sums_by_index(device: str) -> Any:
    index = torch.tensor([0, 2, 0, 1], device=device)
    found = torch.zeros(3, device=device).index_add_(0, index, numbers(device, 4))
    return [found, torch.zeros(3, device=device).scatter_reduce(0, index, numbers(device, 4), "amax"), index.unique()]


@program
def checks(device: str) -> Any:
    value = numbers(device, 4)
    value[2] = float("nan")
    return [bool(value.isnan().any()), torch.equal(value, value), bool((value > 5).all()), value.nan_to_num().sum()]


@program
def repeated(device: str) -> Any:
    counts = torch.tensor([1, 0, 3], device=device)
    return [torch.repeat_interleave(counts, counts), torch.zeros(int(counts.sum()), device=device), counts.cumprod(0)]


@program
def complex_numbers(device: str) -> Any:
    value = torch.complex(numbers(device, 3), numbers(device, 3))
    return [value.conj().imag, (value * value.conj()).real, torch.view_as_real(value).sum()]


@program
def checkpointed(device: str) -> Any:
    from torch.utils.checkpoint import checkpoint

    value = numbers(device, 3).requires_grad_()
    checkpoint(lambda each: each.exp().sum(), value, use_reentrant=False).backward()
    return value.grad


@program
def hooks(device: str) -> Any:
    seen, value = [], numbers(device, 3).requires_grad_()
    value.register_hook(lambda gradient: seen.append(gradient.sum().item()))
    (value * 3).sum().backward()
    return seen


@program
def streams_and_events(device: str) -> Any:
    value = numbers(device, 3)
    if device == "cpu":
        return value + 1
    stream, begin, end = torch.cuda.Stream(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream.wait_stream(torch.cuda.current_stream())
    begin.record(stream)
    with torch.cuda.stream(stream), torch.cuda.nvtx.range("work"):
        value = value + 1
        value.record_stream(stream)
    end.record(stream)
    end.synchronize()
    assert begin.elapsed_time(end) > 0
    return value


@program
def pools(device: str) -> Any:
    if device == "cpu":
        return numbers(device, 3)
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        value = numbers(device, 3)
    torch.cuda.memory.memory_summary()
    torch.cuda.memory.memory_snapshot()
    torch.cuda.reset_accumulated_memory_stats()
    return value


@program
def as_an_array(device: str) -> Any:
    value = numbers(device, 3)
    if device == "cuda":
        assert value.__cuda_array_interface__["data"][0] == value.data_ptr()
    return value


@program
def settings(device: str) -> Any:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = numbers(device, 3, 4) @ numbers(device, 4, 2)
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_tf32 = before
    return found


@program
def padded_batch(device: str) -> Any:
    lengths = torch.tensor([3, 1], device=device)
    mask = torch.arange(int(lengths.max()), device=device) < lengths[:, None]
    packed = nn.utils.rnn.pack_padded_sequence(numbers(device, 2, 3), lengths.cpu(), batch_first=True)
    return [mask, packed.data, nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0]]


@program
def random_draws(device: str) -> Any:
    draws = []
    for _ in range(2):
        torch.manual_seed(7)
        draws.append(torch.rand(1000, device=device))
    return [torch.equal(*draws), bool(0.4 < draws[0].mean() < 0.6), len(torch.randperm(9, device=device).unique())]


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value.detach().cpu()]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in flat(each)]
    return [torch.tensor(value)]


def said() -> int:
    return sum(use.count for use in [*values.unknown_reads(), *values.assumed_shapes()])


def report(programs: dict[str, Callable[[str], Any]]) -> None:
    """Runs the programs on both devices, and prints what differs, what of that is not said, and what else is said."""
    different, unsaid, needless = {}, [], []
    for name, function in programs.items():
        before = said()
        try:
            found, expected = flat(function("cuda")), flat(function("cpu"))
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-4, equal_nan=True)
            if said() > before:
                needless.append(name)
        except Exception as error:
            different[name] = f"{type(error).__name__}: {error}"
            if said() == before:
                unsaid.append(name)
    print(json.dumps({"programs": len(programs), "different": different, "unsaid": unsaid, "needless": needless}))


if __name__ == "__main__":
    report(PROGRAMS)
