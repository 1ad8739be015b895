# SPDX-License-Identifier: Apache-2.0
"""What programs decide by values, on a virtual GPU: each function's results are printed as JSON.

`python virtual_values.py NAME...`; the functions that take a device run on the CPU as well, which is their oracle.
"""

import json
import sys
import threading
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from opacus_memprof import virtual_gpu

if "without" in sys.argv:
    from opacus_memprof.virtual_gpu import process

    process._install_values = lambda: None
virtual_gpu.start("h200")

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from opacus_memprof.virtual_gpu import values  # noqa: E402

warnings.simplefilter("ignore")


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return [plain(each) for each in value] if isinstance(value, tuple | list) else value


def refusal(function: Callable[[Tensor], Any], tensor: Tensor) -> str:
    try:
        function(tensor)
    except (RuntimeError, ValueError) as error:
        return type(error).__name__
    return ""


def operations(device: str) -> list[Any]:
    """Operations whose results decide: labels, masks, counts, shapes."""
    labels = torch.tensor([3, 1, 3, 2, 1, 7, 0]).to(device)
    tokens = torch.arange(24, device=device).view(4, 6) * 5 % 13
    mask = tokens > 6
    ordered = torch.zeros(4, 6, dtype=torch.long, device=device)
    ordered[torch.arange(4, device=device), labels[:4] % 6] = 1
    inverse = torch.empty_like(labels)
    inverse[labels.argsort(stable=True)] = torch.arange(7, device=device)
    columns = torch.empty(4, 3, device=device)  # written column by column
    for column in range(3):
        columns[:, column] = tokens[:, column].float() * column
    many = torch.empty(6000, 2, device=device)  # the same with thousands of rows, written twice
    for column in (0, 1, 0, 1):
        many[:, column] = torch.arange(6000.0, device=device) * (column + 1)
    theta = torch.arange(12.0, device=device).view(2, 2, 3)
    torch.use_deterministic_algorithms(True)
    filled = torch.empty(3, dtype=torch.long, device=device)
    counts = labels.unique(return_counts=True)
    torch.use_deterministic_algorithms(False)
    flags = torch.ones(3_000_000, dtype=torch.bool, device=device)  # too large to be executed
    halves = torch.full((2_000_000,), 0.5, device=device)
    counted = torch.zeros((), dtype=torch.long, device=device)
    while not bool(counted >= 5):
        counted += 1
    found = [
        labels.unique(return_inverse=True, return_counts=True),
        torch.unique(tokens % 3, dim=0),
        labels.sort().values.unique_consecutive(return_counts=True),
        mask.nonzero(),
        mask.nonzero().stride(),
        torch.where(labels == 3)[0],
        tokens[mask],
        tokens.masked_select(mask),
        torch.bincount(labels),
        torch.repeat_interleave(labels, labels),
        torch.histc(labels if labels.is_cuda else labels.float(), 4, 0, 8),
        functional.one_hot(labels),
        (labels.max().item(), labels.float().mean().item(), torch.equal(labels, labels.clone())),
        torch.tril(torch.ones(4, 4, device=device)),
        torch.cat([labels, labels.new_tensor([5])]).cumsum(0),
        functional.pad(tokens, (1, 0))[:, ::2].t().contiguous(),
        torch.topk(labels.float(), 3),
        torch.tensor([1.5, 2.5], device=device).half().add_(1).float(),
        (ordered, inverse, counted),
        (flags.all().item(), (~flags).any().item(), (halves == 0.5).all().item(), (halves * 2).max().item()),
        (halves.mean().item(), halves[7].item()),
        torch._foreach_add([labels.float(), halves], 1)[0],
        torch._foreach_pow(0.5, [labels.float()])[0],
        torch.mv(tokens.float(), labels[:6].float()),
        [torch.dot(labels.float(), labels.float()), torch.outer(labels.float(), labels.float())],
        # With a beta of 0 the first argument is memory that was not written.
        torch.baddbmm(
            torch.empty(1, 4, 4, device=device), tokens[None].float(), tokens.t()[None].float(), beta=0, alpha=2
        ),
        torch.empty(4, device=device).addmv_(tokens.float(), labels[:6].float(), beta=0),
        (columns, columns[:, 1], filled, counts),
        (many.sum().item(), many[:, 1].max().item()),
        functional.affine_grid(theta, (2, 1, 70, 60), align_corners=False).double().sum().round(decimals=2).item(),
        functional.pad(tokens[None].float(), (1, 2), mode="circular"),
        functional.pad(tokens[None, None] / 0.0, (1, 2, 3, 1), mode="circular").nan_to_num(),
        torch.kaiser_window(6, device=device).round(decimals=4),
        torch.ldexp(tokens.float(), labels[:6]),
        functional.rrelu(tokens.float() - 4),
        torch.native_batch_norm(tokens[:, :, None].bfloat16(), None, None, None, None, True, 0.1, 1e-5)[1].float(),
        torch.ops.aten._native_batch_norm_legit.no_stats(tokens.bfloat16(), None, None, True, 0.1, 1e-5)[1].float(),
        [
            refusal(solve, torch.full((3, 3), torch.nan, device=device))
            for solve in (torch.linalg.svd, torch.linalg.eigh)
        ],
    ]
    return plain(found)


def results(device: str) -> dict[str, Any]:
    """A model's loss and gradients, through embedding, convolution, normalization, attention and clipping."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(11, 16),
            "convolve": nn.Conv1d(16, 16, 3, padding=1, bias=False),
            "batch": nn.BatchNorm1d(16),
            "root": nn.RMSNorm(16),
            "attend": nn.MultiheadAttention(16, 2, batch_first=True),
            "head": nn.Linear(16, 5),
        }
    )
    tokens = torch.randint(0, 11, (4, 8))
    labels = torch.randint(0, 5, (4,))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        hidden = model["embed"](tokens.to(device)).transpose(1, 2)
        hidden = model["root"](model["batch"](model["convolve"](hidden)).transpose(1, 2))
        hidden, _ = model["attend"](hidden, hidden, hidden, need_weights=False)
        loss = functional.cross_entropy(model["head"](hidden.mean(1)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True)
        optimizer.step()
        losses.append(loss.item())
    gradients = {name: plain(parameter.grad) for name, parameter in model.named_parameters()}
    return {"losses": losses, "gradients": gradients, "mean": plain(model["batch"].running_mean)}


def attention(device: str) -> list[Any]:
    """Fused attention with causal and explicit masks, and its gradients."""
    torch.manual_seed(1)
    found = []
    for masked in (False, True):
        query, key, value = (torch.randn(2, 2, 8, 16).to(device).requires_grad_() for _ in range(3))
        bias = torch.randn(1, 1, 8, 8).to(device) if masked else None
        out = functional.scaled_dot_product_attention(query, key, value, bias, is_causal=not masked)
        out.square().sum().backward()
        found.append(plain([out.detach(), query.grad, key.grad, value.grad]))
    return found


class Counting(Tensor):
    """A subclass that has memory of its own, and whose code calls operators on it."""

    @classmethod
    def __torch_dispatch__(cls, operator: Any, _: Any, arguments: Any = (), keywords: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            return operator(*arguments, **(keywords or {}))


def parts(tensor: Tensor) -> list[Any]:
    """What a sparse, nested or quantized tensor consists of."""
    if tensor.is_quantized:
        return [tensor.int_repr(), tensor.dequantize()]
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout == torch.sparse_coo:
        return [tensor._nnz(), tensor.is_coalesced(), tensor._indices(), tensor._values()]
    if tensor.layout == torch.sparse_csr:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.resolve_conj().resolve_neg()]


def compounds(device: str) -> list[Any]:
    """Tensors that are not one piece of memory, and views that change what bytes mean."""
    from torch.masked import masked_tensor

    dense = torch.arange(9.0).view(3, 3).to(device)
    indices = torch.tensor([[0, 1, 1, 2, 0], [2, 0, 0, 2, 2]], device=device)
    twice = torch.sparse_coo_tensor(indices, torch.arange(3.0, 8, device=device), (3, 3))
    once = twice.coalesce()
    rows = once.to_sparse_csr()
    ragged = torch.nested.nested_tensor([torch.arange(6.0).view(2, 3), torch.ones(3, 3)], device=device)
    steps = torch.quantize_per_tensor(dense - 4, 0.1, 10, torch.qint8)
    channels = torch.quantize_per_channel(dense, dense[1] / 10, dense[0].long(), 0, torch.qint8)
    complex_ = torch.tensor([[1 + 2j, 3 - 1j], [2j, 1.0]], device=device)
    counted = Tensor._make_subclass(Counting, dense.clone())
    counted.add_(1)
    with torch._C._DisableTorchDispatch():
        own = counted.sum().item()
    torch.manual_seed(0)
    embedding = nn.Embedding(10, 4, sparse=True).to(device)
    optimizer = torch.optim.SparseAdam(list(embedding.parameters()), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        embedding(torch.tensor([1, 2, 1, 5], device=device)).square().sum().backward()
        optimizer.step()
    assert embedding.weight.grad is not None
    tensors = [
        once,
        (twice + twice).coalesce(),
        (twice * twice).coalesce(),
        twice.to_dense(),
        dense + twice,
        torch.sparse.mm(twice, dense),
        torch.sparse.mm(twice, twice).coalesce(),
        torch.sparse.softmax(once, 1),
        once.t().coalesce(),
        once.index_select(0, torch.tensor([0, 2], device=device)),
        dense.sparse_mask(once),
        twice.coalesce().mul_(3),
        torch.cat([twice, once]).coalesce(),
        rows,
        rows + rows,
        rows * 2,
        rows.sin(),
        rows @ dense,
        (rows @ rows).to_dense(),
        torch.sparse.sampled_addmm(rows, dense, dense),
        dense.to_sparse_csr(),
        ragged * 2,
        functional.linear(ragged, dense),
        ragged.softmax(-1),
        ragged.to_padded_tensor(0.0),
        torch.nested.nested_tensor([dense[0], dense[1, :2]], device=device, layout=torch.jagged) + 1,
        steps.relu(),
        channels,
        masked_tensor(dense, dense > 3).mean().get_data(),
        torch.view_as_real(complex_.conj() @ complex_),
        complex_.conj().imag + 1,
        embedding.weight.detach(),
        embedding.weight.grad.coalesce(),
    ]
    return [own, [plain(parts(tensor)) for tensor in tensors]]


def sparse_gradients() -> dict[str, Any]:
    """An embedding whose gradient is too large to be computed: how many of its rows are there is known all the same."""
    embedding = nn.Embedding(4000, 1024, sparse=True, device="cuda")
    tokens = torch.arange(6000, device="cuda") % 2500
    embedding(tokens).sum().backward()
    assert embedding.weight.grad is not None
    before = torch.cuda.memory_allocated()
    coalesced = embedding.weight.grad.coalesce()
    taken = torch.cuda.memory_allocated() - before
    return {
        "rows": coalesced._nnz(),
        "taken": taken,
        "indices": coalesced.indices().flatten()[-1].item(),
        "reads": [use.operation for use in values.unknown_reads()],
        "shapes": [use.operation for use in values.assumed_shapes()],
    }


def graphs() -> dict[str, Any]:
    """CUDA graphs: a capture computes nothing, and each replay all of it again."""
    counter = torch.zeros(1, device="cuda")
    given = torch.zeros(4, device="cuda")
    large = torch.ones(1500, 1500, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter += 1
        made = (given * 2 + counter).relu()
        product = made.view(2, 2) @ torch.ones(2, 2, device="cuda")
        drawn = torch.randn(3, device="cuda")
        unknown = (large @ large).sum()
    captured = counter.item()
    draws, results = [], []
    for step in range(3):
        given.fill_(step - 1.0)
        graph.replay()
        draws.append(drawn.tolist())
        results.append([made.tolist(), product.tolist()])
    replays = 0
    while counter.item() < 10:
        graph.replay()
        replays += 1
    known = [use.operation for use in values.unknown_reads()]
    model = nn.Linear(4, 3).cuda()
    graphed = torch.cuda.make_graphed_callables(model, (torch.randn(2, 4, device="cuda"),))
    inputs = torch.arange(8.0).view(2, 4).cuda()
    outputs = graphed(inputs)
    expected = functional.linear(inputs.cpu(), model.weight.cpu(), model.bias.cpu())
    outputs.sum().backward()
    difference = (outputs.cpu() - expected).abs().max().item()
    unknown.item()
    return {
        "captured": captured,
        "results": results,
        "draws": draws,
        "replays": replays,
        "known": known,
        "graphed": [difference, plain(model.weight.grad)],
        "reads": [use.operation for use in values.unknown_reads()],
    }


def higher_order(device: str) -> list[Any]:
    """Operators that Python implements for each dispatch key."""
    from torch._higher_order_ops.scan import scan
    from torch._higher_order_ops.while_loop import while_loop
    from torch.nn.attention.flex_attention import flex_attention

    torch.manual_seed(2)
    x = torch.arange(4.0, device=device)
    query, key, value = (torch.randn(1, 2, 8, 16).to(device) for _ in range(3))
    found = [
        torch.cond(x.sum() > 3, lambda x: x + 1, lambda x: x - 1, (x,)),
        while_loop(lambda i, _: i < 5, lambda i, a: (i + 1, a * 2), (torch.tensor(0, device=device), x)),
        scan(lambda carry, each: (carry + each, carry * each), torch.tensor(0.0, device=device), x),
        flex_attention(query, key, value).float().round(decimals=4),
    ]
    return plain(found)


def dtensor() -> dict[str, Any]:
    """Random operations of DTensor, as FSDP2 initializes parameters."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed.init_process_group("nccl", rank=0, world_size=1, store=distributed.HashStore())
    mesh = init_device_mesh("cuda", (1,))
    sharded = distribute_tensor(torch.zeros(64, 8, device="cuda"), mesh, [Shard(0)])
    sharded.normal_()
    deviation = sharded.to_local().std().item()
    distributed.destroy_process_group()
    return {"deviation": deviation, "reads": [use.operation for use in values.unknown_reads()]}


@triton.jit  # type: ignore[untyped-decorator]
def added(x, y, n, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(x + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)


@triton.jit  # type: ignore[untyped-decorator]
def in_turn(x, y, z, n, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, block)
    left, right = x + at, y + at
    for _ in range(n):
        tl.store(left, tl.load(right) + tl.load(z + at))
        left, right = right, left


@triton.jit  # type: ignore[untyped-decorator]
def one_of(x, y, z, n, block: tl.constexpr):  # type: ignore[no-untyped-def]
    base = x if n > 5 else y
    tl.atomic_add(base + tl.arange(0, block), tl.load(z + tl.arange(0, block)))


def kernels() -> dict[str, Any]:
    """Which of the tensors that a kernel of Triton gets have unknown values afterwards."""

    def unknown(*tensors: Tensor) -> list[bool]:
        found = []
        for tensor in tensors:
            before = sum(use.count for use in values.unknown_reads())
            tensor.sum().item()
            found.append(sum(use.count for use in values.unknown_reads()) > before)
        return found

    def ones() -> tuple[Tensor, ...]:
        return tuple(torch.ones(64, device="cuda") for _ in range(3))

    found = {}
    for kernel in (added, in_turn, one_of):
        x, y, z = ones()
        kernel[(1,)](*(x, y) if kernel is added else (x, y, z), 64, block=64)
        found[kernel.__name__] = unknown(x, y, z)
    whole = torch.ones(64, 2, device="cuda")
    added[(1,)](whole[:8], ones()[0], 8, block=16)
    found["part"] = unknown(whole[:8], whole[8:])

    def step(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        return (x * y).relu()

    x, y, _ = ones()
    result = torch.compile(step)(x, y)
    found["compiled"] = unknown(x, y, result)
    x, y, _ = ones()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        added[(1,)](x, y, 64, block=64)
    captured = unknown(x)
    graph.replay()
    found["graph"] = captured + unknown(x)
    return found


def run_on_both(function: Callable[[str], Any]) -> dict[str, Any]:
    on_cpu = function("cpu")
    return {"cpu": on_cpu, "cuda": function("cuda"), "reads": [use.operation for use in values.unknown_reads()]}


def scaler() -> dict[str, Any]:
    """The scale of a GradScaler whose second step overflows."""
    model = nn.Linear(4, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", growth_interval=2)
    scales, weights = [], []
    for step in range(5):
        loss = model(torch.ones(3, 4, device="cuda") * (float("inf") if step == 1 else 1)).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        weights.append(model.bias.sum().item())
    return {"scales": scales, "stepped": [before != after for before, after in pairwise(weights)]}


def unknown() -> dict[str, Any]:
    """Large results: what they read as, and which lines are named."""
    product = torch.randn(1500, 1500, device="cuda") @ torch.randn(1500, 1500, device="cuda")
    finite = torch.isfinite(product).all().item()
    read = product[3, 4].item()  # here
    rows = (product > 0).nonzero()
    chosen = product.topk(3, dim=-1).indices
    counts = torch.bincount(chosen.flatten(), minlength=1500)
    on_host = product.cpu()  # and here
    return {
        "finite": finite,
        "read": read,
        "host": [on_host.abs().max().item(), (product.sum(0) / 0).isfinite().all().item()],
        "rows": list(rows.shape),
        "counts": [counts.min().item(), counts.max().item()],
        "reads": [(use.operation, use.line.rpartition(":")[2], use.count) for use in values.unknown_reads()],
        "shapes": [(use.operation, use.line.rpartition(":")[2]) for use in values.assumed_shapes()],
        "failures": values.failures(),
    }


def distributions() -> dict[str, Any]:
    """Scales of a normal distribution that are too large to be computed, and one that is not positive."""
    scales = torch.rand(1500, 300, device="cuda").exp()
    drawn = torch.distributions.Normal(0.0, scales).rsample()
    negative = torch.tensor([1.0, -1.0], device="cuda")
    return {
        "shape": list(drawn.shape),
        "refused": refusal(lambda scale: torch.distributions.Normal(0.0, scale), negative),
        "reads": sorted({use.operation for use in values.unknown_reads()}),
    }


def blocks() -> dict[str, Any]:
    """Memory that is used again, a thread, and generators."""
    before = torch.full((1000,), 7, device="cuda")
    address = before.data_ptr()
    del before
    again = torch.empty(1000, dtype=torch.long, device="cuda")
    reused = again.data_ptr() == address
    read = again.unique().tolist()
    computed: list[int] = []
    thread = threading.Thread(target=lambda: computed.append(int(torch.arange(9, device="cuda").sum())))
    thread.start()
    thread.join()
    state = torch.random.get_rng_state()
    draws = []
    for _ in range(2):
        torch.cuda.manual_seed(5)
        draws.append(
            functional.dropout(torch.ones(64, device="cuda")).tolist() + torch.randn(8, device="cuda").tolist()
        )
    own = torch.Generator("cuda").manual_seed(9)
    draws.append(torch.randperm(50, device="cuda", generator=own).sort().values.tolist())
    return {
        "reused": reused,
        "read": read,
        "thread": computed,
        "repeats": draws[0] == draws[1],
        "dropped": sorted(set(draws[0][:64])),
        "permutation": draws[2] == list(range(50)),
        "untouched": torch.equal(state, torch.random.get_rng_state()),
    }


def training(mode: str) -> dict[str, Any]:
    """Peaks of an Opacus training with an embedding, in torch's own counts."""
    from opacus import PrivacyEngine

    from opacus_memprof.clipping import FlashClipEngineMixin

    class FlashClipEngine(FlashClipEngineMixin, PrivacyEngine):
        pass

    torch.manual_seed(0)
    layers = [nn.Embedding(500, 64), nn.Linear(64, 700), nn.ReLU(), nn.Linear(700, 500)]
    model: nn.Module = nn.Sequential(*layers).cuda()
    loader = torch.utils.data.DataLoader(torch.randint(0, 500, (48, 40)), batch_size=16)
    criterion: Any = nn.CrossEntropyLoss()
    made = (FlashClipEngine() if mode == "flash_clip" else PrivacyEngine()).make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters()),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
        **({"criterion": criterion} if mode == "ghost" else {}),
    )
    model, optimizer = made[0], made[1]
    criterion = made[2] if mode == "ghost" else criterion
    for batch in loader:
        batch = batch.cuda()
        optimizer.zero_grad()
        criterion(model(batch)[:, -1], batch[:, 0]).backward()
        optimizer.step()
    stats = torch.cuda.memory_stats()
    peaks = ("requested_bytes.all.peak", "allocation.all.allocated", "reserved_bytes.all.peak")
    return {name: stats[name] for name in peaks} | {"failures": values.failures()}


def mixtral(hidden: int, length: int) -> dict[str, Any]:
    """A mixture of experts: how balanced its routes are."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=200,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
    )
    model = MixtralForCausalLM(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    routes: list[list[int]] = []
    choose = torch.topk

    def topk(*args: Any, **kwargs: Any) -> Any:
        found = choose(*args, **kwargs)
        routes.append(found[1].flatten().bincount(minlength=4).tolist())
        return found

    torch.topk = topk
    losses = []
    for _ in range(2):
        tokens = torch.randint(0, 200, (4, length), device="cuda")
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {
        "losses": losses,
        "routes": routes,
        "reads": sorted({use.operation for use in values.unknown_reads()}),
        "shapes": sorted({use.operation for use in values.assumed_shapes()}),
        "failures": values.failures(),
    }


def gpt2() -> dict[str, Any]:
    """GPT-2 of transformers with padding and dropout, in training and in generation."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=50, eos_token_id=1, bos_token_id=2)
    model = GPT2LMHeadModel(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.arange(64).view(4, 16) % 5 + 3
    mask = torch.ones_like(tokens)
    mask[:, 12:] = 0
    losses = []
    for _ in range(12):
        loss = model(tokens.cuda(), attention_mask=mask.cuda(), labels=tokens.cuda()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    written = model.eval().generate(tokens[:1, :6].cuda(), max_new_tokens=6, do_sample=False, pad_token_id=0)
    return {"losses": losses, "tokens": written.tolist(), "reads": [use.line for use in values.unknown_reads()]}


FUNCTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "operations": lambda: run_on_both(operations),
    "results": lambda: run_on_both(results),
    "attention": lambda: run_on_both(attention),
    "compounds": lambda: run_on_both(compounds),
    "sparse_gradients": sparse_gradients,
    "graphs": graphs,
    "higher_order": lambda: run_on_both(higher_order),
    "dtensor": dtensor,
    "kernels": kernels,
    "scaler": scaler,
    "blocks": blocks,
    "unknown": unknown,
    "distributions": distributions,
    "hooks": lambda: training("hooks"),
    "ghost": lambda: training("ghost"),
    "flash_clip": lambda: training("flash_clip"),
    "small_mixtral": lambda: mixtral(32, 16),
    "mixtral": lambda: mixtral(256, 512),
    "gpt2": gpt2,
}

if __name__ == "__main__":
    print(json.dumps({name: FUNCTIONS[name]() for name in sys.argv[1:] if name != "without"}))
