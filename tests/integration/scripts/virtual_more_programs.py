# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E731, E741, I001
"""More programs for virtual_programs.py, each of which uses many functions of one part of torch."""

import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

from virtual_programs import numbers, report  # before torch

import torch
from torch import nn
from torch.nn import functional

warnings.simplefilter("ignore")
PROGRAMS: dict[str, Callable[[str], Any]] = {}


def program(function: Callable[[str], Any]) -> Callable[[str], Any]:
    PROGRAMS[function.__name__] = function
    return function


@program
def index_put_masks(d: str) -> Any:
    x = numbers(d, 4, 5)
    x[x > 0.5] = torch.arange(int((x > 0.5).sum()), device=d).float()
    x.index_put_(
        (torch.tensor([0, 0, 1], device=d), torch.tensor([1, 1, 2], device=d)),
        torch.tensor([1.0, 2, 3], device=d),
        accumulate=True,
    )
    x[torch.tensor([True, False, True, False], device=d)] *= 2
    x[..., -1][1:3] = 9
    return x


@program
def strided_views(d: str) -> Any:
    x = numbers(d, 4, 6)
    v = x.as_strided((2, 2), (12, 2), 1)
    v += 10
    x.diagonal().fill_(0)
    x.unfold(1, 2, 3).mul_(2)
    torch.flip(x, [0]).copy_(x)
    x.T[2].neg_()
    return [x, x.roll(1, 0), x.rot90(), x.movedim(0, 1).contiguous(), x.expand(2, 4, 6).sum(0)]


@program
def pickling(d: str) -> Any:
    x = numbers(d, 3).requires_grad_()
    b = io.BytesIO()
    torch.save({"x": x, "v": x.detach()[1:]}, b)
    b.seek(0)
    y = torch.load(b, map_location=d)
    z = pickle.loads(pickle.dumps(x))
    y["v"].add_(1)
    return [y["x"], y["v"], z, y["x"].device.type == d]


@program
def func_transforms(d: str) -> Any:
    f = lambda p, x: torch.tanh(x @ p["w"]).sum()
    p = {"w": numbers(d, 3, 2)}
    x = numbers(d, 5, 3)
    from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

    g = vmap(grad(f), (None, 0))(p, x)
    _, b = vjp(lambda x: x.sin(), x)
    _, t = jvp(lambda x: x.cos(), (x,), (x,))
    return [
        g["w"],
        jacrev(lambda w: torch.tanh(x @ w).sum(0))(p["w"]),
        jacfwd(lambda w: (x @ w).pow(2).sum(0))(p["w"]),
        b(x)[0],
        t,
        vmap(lambda a: a.sort().values)(x),
    ]


@program
def nested(d: str) -> Any:
    n = torch.nested.nested_tensor([numbers("cpu", 2, 3), numbers("cpu", 4, 3)], device=d, layout=torch.jagged)
    s = (n * 2).sin()
    return [
        s.values(),
        n.offsets(),
        torch.nested.to_padded_tensor(n, 0.0),
        functional.linear(n, numbers(d, 2, 3)).values(),
    ]


@program
def complex_things(d: str) -> Any:
    z = torch.polar(numbers(d, 4).abs(), numbers(d, 4))
    z[1] *= 1j
    c = z.conj()
    c2 = c + 1
    z.imag.add_(1)
    m = torch.view_as_complex(numbers(d, 3, 3, 2).contiguous())
    return [
        z,
        c2,
        torch.angle(z),
        m @ m.mH,
        torch.linalg.eigvalsh(m @ m.mH),
        z.conj_physical_(),
        torch.view_as_real(c.resolve_conj()),
        z.isreal(),
    ]


@program
def item_chain(d: str) -> Any:
    n = torch.tensor(27, device=d)
    s = ""
    while n != 1:
        s += str(n.item()) + ","
        n = n // 2 if int(n) % 2 == 0 else 3 * n + 1
    x = torch.arange(10, device=d)
    i = int(x[x.float().argmax()])
    return [
        len(s),
        sum(map(ord, s)),
        i,
        f"{x.float().mean():.2f}" == "4.50",
        float(x.sum()),
        bool(torch.tensor(0.0, device=d)),
        list(range(int(x[3]))),
        x[x[2] : x[5]],
    ]


@program
def dlpack(d: str) -> Any:
    x = numbers(d, 4)
    y = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))
    y[0] = 42

    class A:
        def __init__(self, t):
            self.t = t

        @property
        def __cuda_array_interface__(self):
            return self.t.__cuda_array_interface__

    z = torch.as_tensor(A(x), device="cuda") if d == "cuda" else x
    z.mul_(2)
    z[1] = 7
    return [x, y, z, x.sum()]


@program
def graph_inputs(d: str) -> Any:
    x = numbers(d, 4)
    if d == "cpu":
        out = []
        for _ in range(3):
            x = x + 1
            out.append(((x * 2).relu()).clone())
        return out
    st = x.clone()
    g = torch.cuda.CUDAGraph()
    s = torch.cuda.Stream()
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        y = (st * 2).relu()
    torch.cuda.current_stream().wait_stream(s)
    with torch.cuda.graph(g):
        y = (st * 2).relu()
    out = []
    for _ in range(3):
        x = x + 1
        st.copy_(x)
        g.replay()
        out.append(y.clone())
    return out


@program
def make_graphed(d: str) -> Any:
    m = nn.Linear(3, 2).to(d)
    [nn.init.constant_(p, 0.5) for p in m.parameters()]
    x = numbers(d, 4, 3).requires_grad_()
    if d == "cuda":
        m = torch.cuda.make_graphed_callables(m, (x.detach().clone().requires_grad_(),))
    m(x).pow(2).sum().backward()
    return [x.grad, [p.grad for p in m.parameters()]]


@program
def semi_structured(d: str) -> Any:
    if d == "cpu":
        return numbers(d, 32, 64).bfloat16() @ torch.tensor([1.0, 0, 0, 1]).repeat(64, 16).t().bfloat16()
    from torch.sparse import to_sparse_semi_structured

    w = to_sparse_semi_structured(torch.tensor([1.0, 0, 0, 1]).repeat(64, 16).cuda().bfloat16())
    return functional.linear(numbers(d, 32, 64).bfloat16(), w)


@program
def fp8_matmul(d: str) -> Any:
    a = numbers(d, 16, 32).to(torch.float8_e4m3fn)
    b = numbers(d, 16, 32).to(torch.float8_e4m3fn)
    if d == "cpu":
        return (a.float() @ b.float().t()).bfloat16()
    one = torch.tensor(1.0, device=d)
    return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)


@program
def quantized(d: str) -> Any:
    q = torch.quantize_per_tensor(numbers(d, 6), 0.1, 10, torch.quint8)
    c = torch.quantize_per_channel(
        numbers(d, 2, 3), torch.tensor([0.1, 0.2], device=d), torch.tensor([0, 0], device=d), 0, torch.qint8
    )
    return [
        q.dequantize(),
        q.int_repr(),
        c.dequantize(),
        torch.fake_quantize_per_tensor_affine(numbers(d, 5), 0.1, 0, -128, 127),
        torch._int_mm(
            torch.arange(32 * 32, device=d).reshape(32, 32).to(torch.int8) % 5,
            torch.arange(32 * 32, device=d).reshape(32, 32).to(torch.int8) % 3,
        ),
    ]


@program
def jit_module(d: str) -> Any:
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.full((2, 3), 0.5))
            self.register_buffer("n", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.n += 1
            return functional.linear(x, self.w)

    m = torch.jit.script(M()).to(d)
    x = numbers(d, 4, 3)
    for _ in range(3):
        y = m(x)
    b = io.BytesIO()
    torch.jit.save(m, b)
    b.seek(0)
    l = torch.jit.load(b, map_location=d)
    return [y, m.n, l(x), l.n]


@program
def hooks_everywhere(d: str) -> Any:
    seen = []
    m = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).to(d)
    [nn.init.constant_(p, 0.2) for p in m.parameters()]
    m[0].register_forward_hook(lambda s, i, o: seen.append(o.sum().item()))
    m[1].register_full_backward_hook(lambda s, gi, go: seen.append(go[0].abs().max().item()))
    m[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm().item()))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.to(d)):
        l = m(numbers(d, 4, 3)).pow(2).sum()
    l.backward()
    return seen


@program
def save_on_cpu(d: str) -> Any:
    x = numbers(d, 4).requires_grad_()
    with torch.autograd.graph.save_on_cpu(pin_memory=d == "cuda"):
        y = (x.exp() * x.sin()).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x)
    return [g, h]


@program
def rng_state(d: str) -> Any:
    torch.manual_seed(0)
    if d == "cuda":
        s = torch.cuda.get_rng_state()
        a = torch.randn(5, device=d)
        torch.cuda.set_rng_state(s)
        b = torch.randn(5, device=d)
        g = torch.Generator("cuda").manual_seed(4)
        c = torch.rand(3, device=d, generator=g)
        g2 = torch.Generator("cuda").manual_seed(4)
        e = torch.rand(3, device=d, generator=g2)
        with torch.random.fork_rng(["cuda:0"]):
            torch.randn(7, device=d)
        return [torch.equal(a, b), torch.equal(c, e)]
    return [True, True]


@program
def sparse_more(d: str) -> Any:
    i = torch.tensor([[0, 1, 1], [2, 0, 2]], device=d)
    s = torch.sparse_coo_tensor(i, torch.tensor([3.0, 4, 5], device=d), (2, 3))
    c = s.to_sparse_csr()
    x = numbers(d, 3, 2).requires_grad_()
    y = torch.sparse.mm(s, x)
    y.sum().backward()
    return [
        y,
        x.grad,
        c.values(),
        c.crow_indices(),
        (c @ x.detach()),
        torch.sparse.sum(s, 0).to_dense(),
        torch.sparse.softmax(s, 1).to_dense(),
        (s + s).coalesce().values(),
        s.transpose(0, 1).to_dense(),
        numbers(d, 4, 4).relu().to_sparse_bsr((2, 2)).values(),
    ]


@program
def sync_and_events(d: str) -> Any:
    x = numbers(d, 4)
    if d == "cpu":
        return [x * 2 + 1, x * 3]
    s1, s2 = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    e = torch.cuda.Event()
    with torch.cuda.stream(s1):
        y = x * 2
        e.record()
    s2.wait_event(e)
    with torch.cuda.stream(s2):
        y += 1
        z = torch.empty_like(x)
        z.copy_(x * 3, non_blocking=True)
    torch.cuda.synchronize()
    assert s1.query()
    assert e.query()
    return [y, z]


@program
def storage_tricks(d: str) -> Any:
    x = numbers(d, 6)
    s = x.untyped_storage()
    y = torch.empty(0, device=d).set_(s, 2, (2,), (1,))
    y.add_(5)
    z = torch.tensor([], device=d)
    z.set_(x)
    z.resize_(3)
    w = x.data
    w[0] = 99
    st = s.clone()
    t = torch.tensor([], dtype=torch.float32, device=d).set_(st, 0, (6,), (1,))
    t.zero_()
    return [x, y, z, t, s.tolist()[:4], x.storage_offset(), torch.frombuffer(bytearray(8), dtype=torch.float32).to(d)]


@program
def swapping(d: str) -> Any:
    a = numbers(d, 3)
    b = numbers(d, 3) + 1
    torch.utils.swap_tensors(a, b)
    a, b = b, a
    a.data, b.data = b.data.clone(), a.data.clone()
    p = nn.Parameter(a)
    p.data = b
    return [a, b, p]


@program
def large_view_small(d: str) -> Any:
    big = torch.zeros(3_000_000, device=d)
    big[5:9] = torch.arange(4.0, device=d)
    big[-1] = 7
    return [big[5:9], big[-1], big[4:10].sum(), big[1_000_000:1_000_004]]


@program
def large_index(d: str) -> Any:
    big = torch.zeros(1000, 3000, device=d)
    big[torch.tensor([3], device=d), torch.tensor([5], device=d)] = 2.0
    e = nn.Embedding(20000, 64).to(d)
    e.weight.data.fill_(0.5)
    e.weight.data[7] = 1.0
    return [big[3, 5], big[3, 6], e(torch.tensor([7, 8], device=d)).sum(1)]


@program
def out_over_its_input(d: str) -> Any:
    z = torch.complex(numbers(d, 3), numbers(d, 3))
    x = numbers(d, 3) + 4
    torch.neg(x, out=x)
    torch.cumsum(x, 0, out=x)
    x.abs_().add_(4).mvlgamma_(2)
    z.conj_physical_()
    return [x, z, torch.sort(x, out=(x, torch.empty(3, dtype=torch.long, device=d)))[0]]


@program
def bags_of_embeddings(d: str) -> Any:
    index, starts = torch.tensor([1, 2, 4, 5, 0], device=d), torch.tensor([0, 2, 2], device=d)
    table, scales = numbers(d, 6, 2).requires_grad_(), numbers(d, 5).requires_grad_()
    found = []
    for mode in ("sum", "mean", "max"):
        result = functional.embedding_bag(index, table, starts, mode=mode)
        found += [result, *torch.autograd.grad(result.pow(2).sum(), table)]
    result = functional.embedding_bag(index, table, starts, mode="sum", per_sample_weights=scales)
    found += [result, *torch.autograd.grad(result.pow(2).sum(), [table, scales])]
    sparse = functional.embedding_bag(index, table, starts, mode="sum", sparse=True)
    (gradient,) = torch.autograd.grad(sparse.sum(), table)
    ends = torch.tensor([0, 2, 5], device=d)
    return [*found, gradient.to_dense(), functional.embedding_bag(index, table, ends, include_last_offset=True)]


@program
def norms_in_half_and_frozen_norms(d: str) -> Any:
    """Their kernels save means in float, and frozen ones what the CPU does not save."""

    def trained(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.requires_grad_()
        y = layer(x)
        (y * numbers("cpu", *y.shape).to(y)).sum().backward()
        return [y, x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()]

    found = []
    for make, shape in ((nn.LayerNorm, (4, 3)), (nn.BatchNorm1d, (4, 3)), (nn.BatchNorm2d, (2, 3, 4, 4))):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for training in (True, False):
                x = numbers("cpu", *shape).sin().to(dtype)
                near = trained(make(3).to(d, dtype).train(training), x.to(d))
                exact = trained(make(3).train(training), x.float()) if d == "cuda" else near
                found += [
                    bool((a.cpu().double() - b.double().cpu()).abs().max() < 0.03 * (1 + b.abs().max()))
                    for a, b in zip(near, exact, strict=True)
                ]
    return found


@program
def deterministic(d: str) -> Any:
    found = []
    torch.use_deterministic_algorithms(True)
    try:
        for size in (3, 4, 5):  # in memory that was used before, which is filled first
            value, index = numbers(d, size), torch.tensor([0, 2], device=d)
            value.index_put_((index,), torch.tensor(2.0, device=d))
            found += [value, value.clone().index_add_(0, index, torch.ones(2, device=d)), value.cumsum(0)]
    finally:
        torch.use_deterministic_algorithms(False)
    return found


@program
def averages_of_large_batches(d: str) -> Any:
    """Running averages are small, and what they are computed from is not."""
    layer = nn.BatchNorm2d(3).to(d)
    layer(torch.ones(2, 3, 400, 400, device=d) * torch.arange(3, device=d).view(3, 1, 1))
    return layer.running_mean


@program
def averages_in_evaluation(d: str) -> Any:
    layer = nn.BatchNorm2d(3).to(d).eval()
    layer(torch.ones(2, 3, 400, 400, device=d) * torch.arange(3, device=d).view(3, 1, 1))
    return [layer.running_mean, layer.running_var]


@program
def averages_in_a_graph(d: str) -> Any:
    layer, value = nn.BatchNorm1d(3).to(d), numbers(d, 6, 3)
    if d == "cpu":
        return [[layer(value) for _ in range(3)][-1], layer.running_mean, layer.running_var]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = layer(value)
    for _ in range(3):
        graph.replay()
    return [result, layer.running_mean, layer.running_var]


@program
def parts_of_a_batch_norm_over_ranks(d: str) -> Any:
    """What nn.SyncBatchNorm calls where two ranks have two and three of five samples."""
    x, of_result = numbers(d, 5, 3, 4).mul(7).sin(), numbers(d, 5, 3, 4).mul(5).cos()
    weight, bias = numbers(d, 3) + 3, numbers(d, 3)
    averages = torch.zeros(3, device=d), torch.ones(3, device=d)
    if d == "cpu":
        leaves = [each.requires_grad_() for each in (x, weight, bias)]
        result = functional.batch_norm(x, *averages, weight, bias, True, 0.1)
        return [result, *torch.autograd.grad(result, leaves, of_result), *averages]
    means, deviations = zip(*(torch.batch_norm_stats(part, 1e-5) for part in (x[:2], x[2:])), strict=True)
    shared = torch.stack(means), torch.stack(deviations)
    counts = torch.tensor([8, 12], dtype=torch.int32, device=d)
    found = torch.batch_norm_gather_stats_with_counts(x, *shared, *averages, 0.1, 1e-5, counts.float())
    result = torch.batch_norm_elemt(x, weight, bias, *found, 1e-5)
    sums = torch.batch_norm_backward_reduce(of_result, x, *found, weight, True, True, True)
    of_input = torch.batch_norm_backward_elemt(of_result, x, *found, weight, *sums[:2], counts)
    return [result, of_input, *sums[2:], *averages]


@program
def kernels_of_cudnn(d: str) -> Any:
    image, grid = numbers(d, 2, 3, 5, 5).requires_grad_(), (numbers(d, 2, 4, 4, 2) / 2).requires_grad_()
    sampled = functional.grid_sample(image, grid, align_corners=True)
    found = [sampled, *torch.autograd.grad(sampled.pow(2).sum(), [image, grid])]
    scores = numbers(d, 20, 3, 6).mul(9).sin().requires_grad_()
    targets = torch.tensor([1, 2, 3, 4, 1, 1, 2, 5, 5, 4], dtype=torch.int32)  # on the CPU, as cuDNN wants them
    loss = functional.ctc_loss(scores.log_softmax(-1), targets, (20, 20, 20), (4, 4, 2), reduction="none")
    return [*found, loss, *torch.autograd.grad(loss.sum(), scores)]


@program
def products_in_another_type(d: str) -> Any:
    a, b = (numbers(d, 8, 8) * 4).round().bfloat16(), (numbers(d, 2, 4, 4) * 4).round().half()
    if d == "cpu":
        a, b = a.float(), b.float()
        return [a @ a, b @ b, 2 * a + a @ a / 2, b + 3 * (b @ b)]
    found = [torch.mm(a, a, out_dtype=torch.float), torch.bmm(b, b, out_dtype=torch.float)]
    found += [torch.addmm(a.float(), a, a, out_dtype=torch.float, beta=2, alpha=0.5)]
    return [*found, torch.baddbmm(b.float(), b, b, out_dtype=torch.float, alpha=3)]


@program
def kernels_that_stop_at_what_they_find(d: str) -> Any:
    rows = torch.arange(6000, device=d).view(2, 3000) % 7  # too long for one block: counted from the host
    square = numbers(d, 3, 6, 6).mul(9).sin()
    square = square @ square.mT + torch.eye(6, device=d)
    return [rows.mode(1, keepdim=True).values, torch.linalg.lstsq(square, square).solution]


if __name__ == "__main__":
    report(PROGRAMS)
