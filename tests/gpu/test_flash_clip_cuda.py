# SPDX-License-Identifier: Apache-2.0
"""flash_clip on a GPU: the kernels against float64, training against hooks mode, and what it keeps and allocates."""

import copy
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.cuda import CUDAGraph
from torch.utils.data import DataLoader, TensorDataset

import opacus_memprof
from opacus_memprof.clipping import adopt_grad_samples
from opacus_memprof.clipping.arguments import ClipRule
from opacus_memprof.clipping.bookkeeping import Bookkeeping
from opacus_memprof.clipping.bookkeeping.backward_pass import BackwardPass
from opacus_memprof.clipping.kernels import gram as gram_triton
from opacus_memprof.clipping.kernels import native
from opacus_memprof.clipping.kernels.gram import gram_squared_norms_cuda
from opacus_memprof.clipping.kernels.norms import gram_squared_norms
from opacus_memprof.clipping.kernels.stacks import (
    group_norm_gradients_cuda,
    token_norm_gradients_cuda,
    weighted_sum_cuda,
)
from opacus_memprof.clipping.kernels.sums import scale_single_samples
from opacus_memprof.clipping.layers import LAYERS
from opacus_memprof.clipping.layers.small_layers import find_deferred_norms, pop_small_sums
from opacus_memprof.clipping.workspace import Workspace
from opacus_memprof.errors import MemprofError
from tests.integration.clipping_launches import LAUNCHES, count_launches, float32_difference
from tests.integration.flash_clip_models import MODELS, assert_same, criterion, make_private, parameters
from tests.unit.clipping_cases import CASES, Case, per_sample_gradients, randomized, relative_error

MIB = 1 << 20


@pytest.fixture(params=["highest", "high"])
def precision(request: pytest.FixtureRequest) -> Any:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


class LaunchedWith:
    """Replaces a Triton kernel and notes the constants of its launches."""

    def __init__(self) -> None:
        self.constants: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: self.constants.append(constants)


@pytest.mark.parametrize(
    ("set_precision", "used"),
    [
        (lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"), "tf32"),
        (lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee"), "ieee"),
        (lambda: torch.set_float32_matmul_precision("high"), "tf32"),
        (lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", False), "ieee"),
    ],
    ids=["tf32", "ieee", "high", "allow_tf32"],
)
def test_gram_kernel_follows_either_interface_to_tf32(
    set_precision: Callable[[], None], used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a program has set fp32_precision, reading the old settings raises."""
    launched = LaunchedWith()
    monkeypatch.setattr(gram_triton, "gram_tile", launched)
    g, a = torch.randn(2, 8, 64, device="cuda"), torch.randn(2, 64, 16, device="cuda")
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        set_precision()
        gram_squared_norms_cuda(g, a)
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = before
    assert [constants["PRECISION"] for constants in launched.constants] == [used]


@pytest.mark.true_numbers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [(2, 5, 7, 3), (3, 33, 40, 65), (16, 512, 768, 3072), (2, 1000, 130, 70), (1, 4096, 256, 16), (4, 49, 512, 4608)],
)
def test_gram_kernel(shape: tuple[int, int, int, int], dtype: torch.dtype, precision: str) -> None:
    count, tokens, rows, columns = shape
    torch.manual_seed(0)
    tolerance = 1e-4 if dtype == torch.float32 and precision == "highest" else 2e-3
    for transposed in (True, False):
        g = torch.randn(count, tokens, rows, device="cuda", dtype=dtype).mT
        a = torch.randn(count, tokens, columns, device="cuda", dtype=dtype)
        if not transposed:
            g, a = g.contiguous(), a.mT.contiguous().mT
        exact = torch.stack([(g[n].double() @ a[n].double()).square().sum() for n in range(count)])
        norms = gram_squared_norms_cuda(g, a)
        torch.testing.assert_close(norms.double(), exact, rtol=tolerance, atol=0)
        assert torch.equal(norms, gram_squared_norms_cuda(g, a))  # no atomics


@pytest.mark.true_numbers
@pytest.mark.parametrize(
    ("dtype", "size", "rest"),
    [
        (torch.float32, 1e8, 8192.0),
        (torch.float32, 1.0, 2.0**-7),
        (torch.bfloat16, 256.0, 2.0),
        (torch.float16, 1024.0, 1.0),
        (torch.float64, 1e12, 8192.0),
    ],
)
@pytest.mark.parametrize("shape", [(2, 48, 70), (200, 768, 768), (1000, 130, 70)])
def test_gram_norms_whose_tokens_cancel(
    shape: tuple[int, int, int], dtype: torch.dtype, size: float, rest: float, precision: str
) -> None:
    """Between ordinary samples, without waiting for the device."""
    tokens, rows, columns = shape
    torch.manual_seed(0)
    g, a = torch.randn(3, tokens, rows, device="cuda"), torch.randn(3, tokens, columns, device="cuda")
    g, a = g.double(), a.double()
    g[1], a[1] = 0, 0.25
    g[1, 0], g[1, -1] = size, rest - size
    g, a = g.to(dtype).mT, a.to(dtype)
    exact = (g.double() @ a.double()).flatten(1).square().sum(1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        norms = gram_squared_norms(g, a, Workspace(1 << 28))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(norms.double(), exact, rtol=2e-3 if precision != "highest" else 1e-3, atol=0)


@pytest.mark.true_numbers
def test_gram_norms_of_factors_out_of_range() -> None:
    g, a = torch.randn(3, 64, 48, device="cuda").mT * 1e-23, torch.randn(3, 64, 70, device="cuda") * 1e19
    exact = (g.double() @ a.double()).flatten(1).square().sum(1)
    torch.testing.assert_close(gram_squared_norms_cuda(g, a).double(), exact, rtol=1e-3, atol=0)


@pytest.mark.true_numbers
def test_gram_kernel_beyond_two_to_the_31_elements() -> None:
    g = torch.zeros(3, 1024, 1 << 20, device="cuda", dtype=torch.float16).mT
    a = torch.ones(3, 1024, 16, device="cuda", dtype=torch.float16)
    g[2, 7, 1000] = 2.0
    assert gram_squared_norms_cuda(g, a).tolist() == [0.0, 0.0, 64.0]


@pytest.mark.true_numbers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 3), (5, 7, 11), (16, 2048, 2049)])
def test_sum_kernel(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stack, factors = torch.randn(shape, device="cuda").to(dtype), torch.rand(shape[0], device="cuda")
    expected = torch.einsum("n,n...->...", factors.double(), stack.double())
    torch.testing.assert_close(
        weighted_sum_cuda(stack, factors, torch.float32).double(), expected, rtol=1e-5, atol=1e-5
    )


def test_a_launch_passes_what_tritons_own_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia.driver import CudaLauncher

    passed: list[list[Any]] = []
    call = CudaLauncher.__call__

    def noted(launcher: Any, *arguments: Any) -> Any:
        like = [(a.shape, a.dtype) if isinstance(a, torch.Tensor) else a for a in arguments]
        passed.append(like[:6] + like[7:])  # without an object that tells of this launch
        return call(launcher, *arguments)

    monkeypatch.setattr(CudaLauncher, "__call__", noted)
    x, g = torch.randn(2, 3, 12, 5, 7, device="cuda")
    for _ in range(2):
        native._compiled.clear()  # the next launches are Triton's own
        for _ in range(2):
            group_norm_gradients_cuda(x, g, 4, 1e-5)
            gram_squared_norms_cuda(g.flatten(2), x.flatten(2).mT)
            weighted_sum_cuda(x.flatten(1)[:1], torch.rand(1, device="cuda"), torch.float32)
        assert len(native._compiled) == 4  # of Gram norms two
    assert passed[:4] == passed[4:8] == passed[8:12] == passed[12:]


@pytest.mark.true_numbers
def test_kernels_that_are_launched_again() -> None:
    """A second launch goes without Triton's look at its arguments, unless their addresses are aligned otherwise."""
    torch.manual_seed(0)
    for dtype, offset in [(torch.float32, 0), (torch.float32, 0), (torch.float32, 1), (torch.bfloat16, 0)] * 2:
        storage = torch.randn(2, 3 * 12 * 35 + offset, device="cuda").to(dtype)
        x, g = (each[offset:].view(3, 12, 5, 7) for each in storage)
        normalized = torch.nn.functional.group_norm(x.double(), 4)
        weight, bias = group_norm_gradients_cuda(x, g, 4, 1e-5)
        torch.testing.assert_close(weight.double(), (normalized * g).sum((2, 3)), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(bias.double(), g.double().sum((2, 3)), rtol=1e-4, atol=1e-4)
        stack, factors = x.flatten(1), torch.rand(3, device="cuda")
        total = weighted_sum_cuda(stack, factors, torch.float32)
        torch.testing.assert_close(total.double(), factors.double() @ stack.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.true_numbers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [nn.LayerNorm, nn.RMSNorm])
def test_gradients_of_norms_of_small_inputs(build: type[nn.LayerNorm | nn.RMSNorm], dtype: torch.dtype) -> None:
    """Against autograd: the default eps is larger than their squares."""
    torch.manual_seed(0)
    norm = build(300).cuda()
    x, g = (1e-4 * torch.randn(2, 3, 70, 300, device="cuda")).to(dtype)
    weight, bias = token_norm_gradients_cuda(
        x, g, norm.eps or torch.finfo(torch.float32).eps, has_mean=build is nn.LayerNorm
    )
    for n in range(len(x)):
        norm.zero_grad()
        norm(x[n].float()).backward(g[n].float())
        for found, parameter in zip((weight, bias), norm.parameters(), strict=False):
            assert found is not None
            torch.testing.assert_close(found[n], parameter.grad, rtol=1e-4, atol=1e-8)


# Circular padding copies, in passing, from what it has not filled yet: a virtual GPU takes what comes of that for not
# computed.
def _needs_kernels(case: Case) -> bool:
    """Whether Triton's kernels take part in float64, too: where Gram norms cancel, the gradient is formed."""
    gram = ("linear_3d_short", "linear_3d_no_bias", "linear_4d_short", "linear_tall", "conv2d_few_positions")
    return "circular" in case.name or case.name in gram


@pytest.mark.parametrize("megabytes", [0.02, 256])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, 1e-10),  # without Triton, whose kernels only a GPU runs
        pytest.param(torch.float32, 1e-4, marks=pytest.mark.true_numbers),
        pytest.param(torch.bfloat16, 2e-2, marks=pytest.mark.true_numbers),
    ],
)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.true_numbers) if _needs_kernels(case) else case for case in CASES],
    ids=lambda case: case.name,
)
def test_layers(case: Case, dtype: torch.dtype, tolerance: float, megabytes: float) -> None:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    module, x = randomized(case), case.inputs(5)
    g = torch.randn_like(module(x)).to(dtype)
    x = x if case.indices else x.to(dtype)
    module.to(dtype).double()
    exact = per_sample_gradients(module, x if case.indices else x.double(), lambda i: g[i : i + 1].double())
    factors = torch.rand(5, dtype=torch.float64)
    module, x, g = module.to("cuda", dtype), x.cuda(), g.cuda()
    layer, workspace = LAYERS[type(module)]("layer", module), Workspace.from_mib(megabytes)
    kept = layer.keep(x, g, workspace)
    find_deferred_norms({layer: kept})
    expected = sum(e.flatten(1).square().sum(1) for e in exact.values())
    assert relative_error(kept.squared_norms.cpu().double(), expected) < tolerance
    names = {p: n for n, p in module.named_parameters()}
    factors_there = factors.to(kept.squared_norms)
    small = list(pop_small_sums({layer: kept}, factors_there))
    for parameter, total in [*small, *layer.clipped_sums(kept, factors_there, workspace)]:
        clipped = torch.einsum("n,n...->...", factors, exact[names[parameter]])
        assert relative_error(total.cpu().double(), clipped) < tolerance


@pytest.mark.true_numbers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    ("module", "shape", "outputs"),
    [
        (nn.Linear(256, 192, bias=False), (8, 100, 256), (8, 100, 192)),
        (nn.Conv1d(64, 48, 1, bias=False), (8, 64, 20), (8, 48, 20)),
        (nn.Conv2d(64, 64, 3, padding=1, bias=False), (8, 64, 5, 5), (8, 64, 5, 5)),
        (nn.Conv2d(64, 64, 3, padding=1, bias=False), (8, 64, 14, 14), (8, 64, 14, 14)),  # norms from gradients
        (nn.Conv2d(64, 64, 3, groups=2, bias=False), (8, 64, 4, 4), (8, 64, 2, 2)),
        (nn.Embedding(300, 96), (8, 40), (8, 40, 96)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_a_sample_that_cancels_adds_no_more_than_its_bound(
    module: nn.Module,
    shape: tuple[int, ...],
    outputs: tuple[int, ...],
    passes: int,
    dtype: torch.dtype,
    precision: str,
) -> None:
    """The clipped sum with and without the sample, whose tokens cancel except for a small rest."""
    torch.manual_seed(0)
    is_table = isinstance(module, nn.Embedding)
    x = torch.randint(300, shape) if is_table else torch.randn(shape)
    g = torch.randn(outputs)
    x[1], g[1] = 3 if is_table else 0.25, 0
    large, rest = (1e8, 8192.0) if dtype == torch.float32 else (2.0**20, 2.0**13)
    token_dim = 0 if is_table or isinstance(module, nn.Linear) else 1
    g[1].select(token_dim, 0).fill_(large)
    g[1].select(token_dim, 1).fill_(rest - large)
    totals = []
    for samples in (list(range(8)), [0, *range(2, 8)]):
        layer = LAYERS[type(module)]("layer", copy.deepcopy(module).to("cuda", dtype))
        book = Bookkeeping(ClipRule("flat", 1.0), "sum", Workspace(1 << 28))
        book.places = {layer.weight(): 0}
        book._passes.append(BackwardPass(len(samples), forwards={1}))
        x_there = x[samples].cuda() if is_table else x[samples].to("cuda", dtype)
        g_there = g[samples].to("cuda", dtype)
        if passes == 2:
            book.mode = "norms"
            book.add(layer, x_there, g_there, 1)
            book.begin_sums()
        book.add(layer, x_there, g_there, 1)
        ((_, total),) = book.pop_clipped_sums()
        totals.append(total.double())
    added = float((totals[0] - totals[1]).norm())
    assert 0.9 < added < 1 + (1e-3 if precision == "highest" else 5e-3)  # TF32 rounds the sums of the others, too


@pytest.mark.true_numbers
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_step_with_few_launches(
    name: str, set_fp32_precision: Callable[[Any, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_float32_matmul_precision("highest")
    # Otherwise cuDNN convolves in TF32, in kernels that differ between a batch and a sample by itself.
    set_fp32_precision(torch.backends.cudnn.conv, "ieee")
    launched = count_launches(monkeypatch)
    assert float32_difference(name, "cuda") < 1e-4
    assert launched == LAUNCHES[name]


@pytest.mark.true_numbers
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_step_of_a_single_sample(name: str, set_fp32_precision: Callable[[Any, str], None]) -> None:
    torch.set_float32_matmul_precision("highest")
    set_fp32_precision(torch.backends.cudnn.conv, "ieee")
    assert float32_difference(name, "cuda", samples=1) < 1e-4


@pytest.mark.true_numbers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shapes", [[(1, 4096, 4097)], [(1, 3), (1, 70, 50), (1, 1025)]])
def test_single_samples_are_scaled_in_place(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stacks, factors = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes], torch.rand(1, device="cuda")
    expected = [(stack.float() * factors).to(dtype)[0] for stack in stacks]
    for total, scaled, stack in zip(scale_single_samples(stacks, factors), expected, stacks, strict=True):
        assert torch.equal(total, scaled)
        assert total.data_ptr() == stack.data_ptr()


@pytest.mark.true_numbers  # a virtual GPU has the CPU's kernels: tests/integration/test_flash_clip.py
@pytest.mark.parametrize("passes", [1, 2, "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_hooks(name: str, passes: Any) -> None:
    torch.manual_seed(0)
    build, data = MODELS[name]
    model, samples = build().double().cuda(), data(12)
    results = []
    for mode in ("hooks", "flash_clip"):
        options = {"flash_clip_passes": passes} if mode == "flash_clip" else {}
        generator = torch.Generator("cuda").manual_seed(3)
        private = make_private(copy.deepcopy(model), samples, mode, noise_generator=generator, **options)
        module, optimizer, loader = private
        for x, y in loader:
            optimizer.zero_grad()
            criterion("mean")(module(x.cuda()), y.cuda()).backward()
            optimizer.step()
        results.append(parameters(module))
    assert_same(results[1], results[0], 1e-9)


def peak_of_backward(mode: str, tokens: int, **options: Any) -> int:
    """Bytes above what was there before, at the highest point of one forward and backward of two wide layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
    data = torch.utils.data.TensorDataset(torch.zeros(4, 1), torch.zeros(4))
    private = make_private(model, data, mode, batch=1, noise_generator=None, **options)
    module, optimizer = private[0], private[1]
    x = torch.randn(1, tokens, 64, device="cuda")
    for _ in range(2):  # the first warms up library workspaces
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output = module(x)
        if mode == "ghost":
            private[2](output.flatten(1), torch.zeros(1, dtype=torch.long, device="cuda")).backward()
        else:
            output.square().mean().backward()
        del output
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        optimizer.zero_grad(set_to_none=True)
    return peak


@pytest.mark.usefixtures("no_workspaces")
def test_no_tokens_by_tokens_matrix() -> None:
    tokens = 8192
    assert peak_of_backward("ghost", tokens) > 2 * tokens * tokens * 4
    assert peak_of_backward("flash_clip", tokens, flash_clip_workspace_mb=8, check="off") < tokens * tokens * 4 / 8


@pytest.mark.true_numbers
def test_autocast() -> None:
    torch.manual_seed(0)
    build, data = MODELS["transformer"]
    model, samples = build().cuda(), data(8)
    x, y = (t.cuda() for t in samples.tensors)
    results = []
    for mode in ("hooks", "flash_clip"):
        module, optimizer, _ = make_private(
            copy.deepcopy(model), samples, mode, noise_multiplier=0.0, noise_generator=None
        )
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = criterion("mean")(module(x), y)
        loss.backward()
        optimizer.step()
        results.append({n: p.grad.clone() for n, p in module.named_parameters()})
    for name, expected in results[0].items():
        assert float((results[1][name] - expected).norm() / expected.norm()) < 0.02, name


def test_two_passes_where_one_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpointing drops the activations that one pass would have to keep; with little memory left, two run."""
    from opacus_memprof.clipping.module import calls

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(lambda t, one=layer: torch.tanh(one(t)), x, use_reentrant=False)
            return x

    data = torch.utils.data.TensorDataset(torch.zeros(64, 1), torch.zeros(64))
    runs: list[int] = []
    real = calls.run_two_passes
    monkeypatch.setattr(calls, "run_two_passes", lambda *a: (runs.append(1), real(*a)))
    for free, expected in ((64 << 30, 0), (0, 1)):
        module, optimizer, _ = make_private(Checkpointed().cuda(), data, "flash_clip", noise_generator=None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda f=free: (f, 80 << 30))
        monkeypatch.setattr(torch.cuda, "memory_reserved", torch.cuda.memory_allocated)
        runs.clear()
        module(torch.randn(64, 32, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        assert len(runs) == expected


def test_a_capture_is_refused_and_leaves_training_as_it_was() -> None:
    data = TensorDataset(torch.randn(4, 8), torch.randint(2, (4,)))
    module, optimizer, _ = make_private(nn.Linear(8, 2).cuda(), data, "flash_clip", noise_generator=None)
    x, y = (tensor.cuda() for tensor in data.tensors)

    def backward() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()

    for work in (backward, optimizer.step):
        with pytest.raises(MemprofError, match="cannot be captured in a CUDA graph"), torch.cuda.graph(CUDAGraph()):
            work()
        if work == backward:
            backward()
    optimizer.step()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_grad_samples_without_a_copy(tmp_path: Path) -> None:
    """The per-sample gradients of the largest layer are no longer held twice.

    The peak is lower by its bytes, or as far as what comes next, the noise of the largest parameter beside all sums.
    """
    samples, rows, columns = 24, 4096, 4096

    def peak(name: str) -> tuple[int, str]:
        gc.collect()  # the model before
        torch.manual_seed(0)
        model = nn.Linear(columns, rows, bias=False, device="cuda")
        data = TensorDataset(torch.randn(samples, columns), torch.randint(rows, (samples,)))
        with opacus_memprof.profile(tmp_path / name, device="cuda"):
            module, optimizer, loader = opacus_memprof.PrivacyEngine().make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                data_loader=DataLoader(data, batch_size=samples),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                poisson_sampling=False,
            )
            for inputs, labels in loader:
                nn.functional.cross_entropy(module(inputs.cuda()), labels.cuda()).backward()
                optimizer.step()
        found = json.loads((tmp_path / name / "profile.json").read_text())["devices"]["cuda:0"]["peak"]
        return found["requested_bytes"], found["phase"]

    before, phase = peak("copied")
    assert phase == "backward"
    restore = adopt_grad_samples()
    try:
        after, phase = peak("adopted")
    finally:
        restore()
    assert phase == "noise"
    weight = 4 * rows * columns
    assert samples * weight > before - after > (samples - 5) * weight
