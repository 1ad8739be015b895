# SPDX-License-Identifier: Apache-2.0
"""GraphedBackward against the same training without a CUDA graph."""

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import opacus
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import TensorDataset

import opacus_memprof
from opacus_memprof.clipping import GraphedBackward
from opacus_memprof.clipping.arguments import Check
from opacus_memprof.errors import MemprofError
from tests.integration.flash_clip_models import MODELS, assert_same, criterion, make_private, parameters

Batch = tuple[torch.Tensor, torch.Tensor]
Backward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Training:
    """A private training on CUDA, with or without a graph."""

    def __init__(self, model: nn.Module, data: TensorDataset, example: Batch | None, **kwargs: Any) -> None:
        kwargs.setdefault("noise_generator", torch.Generator("cuda").manual_seed(11))
        self.model = copy.deepcopy(model).cuda()
        self.module, self.optimizer, self.loader = make_private(self.model, data, "flash_clip", **kwargs)
        self.backward: Backward = self.eager
        if example is not None:
            self.backward = GraphedBackward(self.module, self.optimizer, self.loss, example)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return criterion("mean")(self.module(x), y)

    def eager(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = self.loss(x, y)
        loss.backward()
        return loss.detach()

    def step(self, batch: Batch) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.backward(*batch)
        self.optimizer.step()
        return loss


def batches(name: str, sizes: list[int], dtype: torch.dtype = torch.float64) -> list[Batch]:
    torch.manual_seed(1)
    found = []
    for size in sizes:
        x, y = MODELS[name][1](size).tensors
        found.append((x.to("cuda", dtype) if x.is_floating_point() else x.cuda(), y.cuda()))
    return found


def both(name: str, dtype: torch.dtype, example: Batch, **kwargs: Any) -> tuple[Training, Training]:
    """(with a graph, without one), of the same model."""
    torch.manual_seed(0)
    model, data = MODELS[name][0]().to(dtype), MODELS[name][1](12)
    return Training(model, data, example, **kwargs), Training(model, data, None, **kwargs)


@pytest.fixture(autouse=True)
def exact_products() -> Any:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.true_numbers
@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", MODELS)
def test_the_parameters_are_those_without_a_graph(
    name: str, dtype: torch.dtype, tolerance: float, clipping: str
) -> None:
    """Also with batches of other sizes between them, and an empty one, and in steps 1 and 2: without the graph."""
    sizes = [4, 4, 4, 3, 4, 0, 4]
    given = batches(name, sizes, dtype)
    count = len(list(MODELS[name][0]().parameters()))
    bound = [0.1 + 0.01 * i for i in range(count)] if clipping == "per_layer" else 0.3
    graphed, eager = both(name, dtype, given[1], clipping=clipping, max_grad_norm=bound, check="first")
    for batch in given:
        losses = graphed.step(batch), eager.step(batch)
        torch.testing.assert_close(*losses, rtol=tolerance, atol=tolerance, equal_nan=True)
        if len(batch[0]):
            assert_norms = graphed.optimizer.bookkeeping.norms, eager.optimizer.bookkeeping.norms
            torch.testing.assert_close(*assert_norms, rtol=10 * tolerance, atol=10 * tolerance)
    assert_same(parameters(graphed.module), parameters(eager.module), tolerance)


@pytest.mark.true_numbers
def test_physical_batches_add_up() -> None:
    """Steps that BatchMemoryManager skips, of which the last part of a batch is smaller than the example."""
    (example,) = batches("transformer", [3])
    graphed, eager = both("transformer", torch.float64, example, batch=8, check="off")
    for each in (graphed, eager):
        with BatchMemoryManager(data_loader=each.loader, max_physical_batch_size=3, optimizer=each.optimizer) as loader:
            for x, y in loader:
                each.step((x.cuda(), y.cuda()))
    assert_same(parameters(graphed.module), parameters(eager.module), 1e-10)


@pytest.mark.true_numbers
def test_several_backwards_for_one_step() -> None:
    given = batches("mlp", [4, 4, 4])
    graphed, eager = both("mlp", torch.float64, given[0], check="off")
    for each in (graphed, eager):
        each.optimizer.bookkeeping.accumulation_allowed = True
        for batch in given:
            each.backward(*batch)
        each.optimizer.step()
    assert_same(parameters(graphed.module), parameters(eager.module), 1e-10)


@pytest.mark.true_numbers
def test_what_the_graph_took_from_python_has_changed() -> None:
    given = batches("mlp", [4] * 5)
    graphed, eager = both("mlp", torch.float64, given[0], check="off")
    for each in (graphed, eager):
        each.step(given[0])
        each.optimizer.max_grad_norm = 0.05
        each.step(given[1])
        each.optimizer.max_grad_norm = 0.3
        each.step(given[2])
        for parameter in each.model.parameters():
            parameter.data = parameter.data.clone()
        each.step(given[3])
        each.optimizer.noise_multiplier = 0.0
        for group in each.optimizer.param_groups:
            group["lr"] = 0.01
        each.step(given[4])
    assert_same(parameters(graphed.module), parameters(eager.module), 1e-10)


@pytest.mark.true_numbers
def test_norms_that_are_not_finite_are_found_and_training_continues() -> None:
    given = batches("mlp", [4, 4, 4])
    given[1][0][2] = float("nan")
    graphed, eager = both("mlp", torch.float64, given[0], check="off")
    for each in (graphed, eager):
        each.step(given[0])
        before = parameters(each.module)
        with pytest.raises(MemprofError, match=r"gradient norm of samples \[2\]"):
            each.step(given[1])
        assert_same(parameters(each.module), before, 0.0)
        each.step(given[2])
    assert_same(parameters(graphed.module), parameters(eager.module), 1e-10)


@pytest.mark.true_numbers
def test_each_replay_draws_its_own_dropout_and_noise() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
    data = TensorDataset(torch.randn(8, 64), torch.randint(64, (8,)))
    x, y = torch.randn(8, 64, device="cuda"), torch.randint(64, (8,), device="cuda")
    before = torch.cuda.get_rng_state()
    training = Training(model, data, (x, y), noise_multiplier=1.0, batch=8, check="off")
    assert torch.equal(before, torch.cuda.get_rng_state())  # what it tried first has drawn nothing
    losses, gradients = [], []
    for _ in range(3):
        losses.append(float(training.step((x, y))))
        gradients.append(model_gradient(training))
        training.optimizer.zero_grad()
    assert len(set(losses)) == 3
    assert not torch.equal(gradients[0], gradients[1])


def model_gradient(training: Training) -> torch.Tensor:
    return torch.cat([p.grad.flatten().clone() for p in training.model.parameters() if p.grad is not None])


class Replayed:
    """Runs steps with a graphed training, and tells in which of them the graph was replayed."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.computed = 0
        graphed: Any = training.backward
        compute_loss = graphed._compute_loss

        def counted(*batch: torch.Tensor) -> torch.Tensor:
            self.computed += 1
            return compute_loss(*batch)

        graphed._compute_loss = counted

    def step(self, batch: Batch) -> bool:
        before = self.computed
        self.training.step(batch)
        return self.computed == before


@pytest.mark.parametrize(
    ("check", "eager"),
    [
        ("first", [5, 6]),
        ("sometimes", [5, 6, 7, 8, 9, 12, 13, 16, 20, 21]),
        ("always", list(range(5, 23))),
        ("off", []),
    ],
)
def test_a_step_whose_check_is_due_goes_without_the_graph(check: Check, eager: list[int]) -> None:
    """The capture and the three runs before it are the first four forwards.

    With "sometimes" a proof is repeated in forwards 8 and 16, and calls are followed in steps 1, 2, 4, 8 and 16 and the
    steps after them, which are forwards 5 to 9, 12, 13, 20 and 21.
    """
    (batch,) = batches("mlp", [4])
    training, _ = both("mlp", torch.float64, batch)
    training.module.situations.check = training.module.parts.check_steps = check  # which are off on a virtual GPU
    replayed = Replayed(training)
    assert [forward for forward in range(5, 23) if not replayed.step(batch)] == eager


def test_an_output_of_an_earlier_call_is_kept() -> None:
    """Its graph has nodes that belong to the stream of that call, which a capture must not wait for."""
    kept: list[torch.Tensor] = []
    training = Training(nn.Linear(9, 4), TensorDataset(torch.randn(12, 9), torch.randint(4, (12,))), None)

    def compute_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept.append(training.module(x))
        return nn.functional.cross_entropy(kept[-1], y)

    batch = torch.randn(4, 9, device="cuda"), torch.randint(4, (4,), device="cuda")
    training.backward = GraphedBackward(training.module, training.optimizer, compute_loss, batch)
    assert len(kept) == 4
    for _ in range(3):
        training.step(batch)


@pytest.mark.true_numbers
@pytest.mark.parametrize("what", ["mean of losses", "outputs", "nothing"])
def test_what_a_loop_keeps_of_a_step_is_seen(what: str) -> None:
    """The loss is one that can be captured, and reads what the loop wrote to a tensor after the step before."""
    data = TensorDataset(torch.randn(12, 9), torch.randint(4, (12,)))
    kept = torch.ones(4, 4, device="cuda")
    seen: list[torch.Tensor] = []
    training = Training(nn.Linear(9, 4), data, None)

    def compute_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = training.module(x)
        seen[:] = [out.detach()]
        return (nn.functional.cross_entropy(out, y, reduction="none") * (out @ kept.T).exp().sum(1)).mean()

    given = [(torch.randn(4, 9, device="cuda"), torch.randint(4, (4,), device="cuda")) for _ in range(6)]
    training.backward = GraphedBackward(training.module, training.optimizer, compute_loss, given[0])

    def train() -> None:
        for batch in given:
            loss = training.step(batch)
            if what == "outputs":
                kept.copy_(seen[0])
            elif what == "mean of losses":
                kept.fill_(loss)

    if what == "nothing":
        train()
    else:
        with pytest.raises(MemprofError, match="left in an earlier step"):
            train()


def test_the_graph_is_not_used_while_the_model_has_hooks() -> None:
    (batch,) = batches("mlp", [4])
    training, _ = both("mlp", torch.float64, batch, check="off")
    replayed = Replayed(training)
    assert replayed.step(batch)
    calls: list[Any] = []
    handle = training.model.register_forward_hook(lambda *_: calls.append(1))
    assert not replayed.step(batch)
    assert calls
    handle.remove()
    assert replayed.step(batch)


def test_a_step_counts_once_and_the_memory_is_given_back() -> None:
    reserved = []
    for _ in range(2):  # libraries keep what they allocated the first time
        given = batches("mlp", [4, 4, 4])
        training, _eager = both("mlp", torch.float64, given[0], check="off")
        steps: list[Any] = []
        training.optimizer.attach_step_hook(steps.append)
        for batch in given:
            training.step(batch)
        assert len(steps) == 3
        assert all(p.grad is not None and p.grad.shape == p.shape for p in training.model.parameters())
        training.backward(*given[0])
        with pytest.raises(ValueError, match="Gradients haven't been cleared"):  # as without a graph
            training.optimizer.step()
        del training, _eager, given, batch, steps
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[0] == reserved[1]


def test_what_it_allocates_is_attributed(tmp_path: Path) -> None:
    """Capturing takes no more memory than a step beside the inputs' copies, and the profiler has a category for all."""
    peaks = {}
    for number, graphed in enumerate((True, False, True)):  # libraries keep what they allocated the first time
        torch.manual_seed(0)
        torch.cuda.empty_cache()
        with opacus_memprof.profile(tmp_path / str(number), device="cuda") as session:
            session.attach(opacus.PrivacyEngine())  # whatever any engine's make_private returns
            model, (batch,) = nn.Sequential(nn.Linear(9, 500), nn.Tanh(), nn.Linear(500, 4)), batches("mlp", [64])
            batch = batch[0].float(), batch[1]
            training = Training(model, TensorDataset(*batch), batch if graphed else None, batch=64, check="off")
            for _ in range(3):
                training.step(batch)
            counts = session.snapshot("step")["devices"]["cuda:0"]
            peaks[graphed] = session.peak()["cuda:0"]
        assert counts["remainder"] == 0
        del training, model
        gc.collect()
    copies = batch[0].nbytes + batch[1].nbytes + (16 << 10)  # and the memory of tables
    for what in ("requested_bytes", "unattributed"):
        without, beside = (({**peak, **peak["categories"]})[what] for peak in (peaks[False], peaks[True]))
        assert beside <= without + copies, what


class Unbound(nn.Module):
    """Reads a number from the GPU, which no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(9, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out if float(out.detach().sum()) != 1.5 else 2 * out


def test_what_cannot_be_graphed_is_said_and_trains_without() -> None:
    data = TensorDataset(torch.randn(8, 9), torch.randint(4, (8,)))
    x, y = torch.randn(4, 9, device="cuda"), torch.randint(4, (4,), device="cuda")
    waiting = Training(nn.Linear(9, 4), data, None)
    waiting.eager(x, y)
    with pytest.raises(MemprofError, match=r"call optimizer.zero_grad\(\)"):
        GraphedBackward(waiting.module, waiting.optimizer, waiting.loss, (x, y))
    waiting.optimizer.zero_grad()
    with pytest.raises(MemprofError, match="the batch on cpu"):
        GraphedBackward(waiting.module, waiting.optimizer, waiting.loss, (x.cpu(), y))

    def with_backward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        waiting.eager(x, y)
        return waiting.loss(x, y)

    waiting.optimizer.bookkeeping.accumulation_allowed = True
    with pytest.raises(MemprofError, match="not run its backward"):
        GraphedBackward(waiting.module, waiting.optimizer, with_backward, (x, y))
    waiting.step((x, y))

    adaptive = {"target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2}
    adaptive |= {"max_clipbound": 10.0, "min_clipbound": 0.01, "unclipped_num_std": 1.0}
    with pytest.raises(MemprofError, match="DPOptimizerFlashClipAdaptive"):
        Training(nn.Linear(9, 4), data, (x, y), clipping="adaptive", **adaptive)

    other = torch.cuda.CUDAGraph()
    with torch.cuda.graph(other):
        torch.rand(3, device="cuda")
    stops = Training(Unbound(), data, None)
    with pytest.raises(MemprofError, match="cannot be captured in a CUDA graph"):
        GraphedBackward(stops.module, stops.optimizer, stops.loss, (x, y))
    stops.step((x, y))
    assert all(p.grad is not None for p in stops.model.parameters())
    torch.rand(3, device="cuda")  # older torch leaves the generator as it is in a capture
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    offset = generator.get_offset()
    other.replay()  # and it is still the generator of other graphs
    assert generator.get_offset() > offset
    waiting.optimizer.zero_grad()
    GraphedBackward(waiting.module, waiting.optimizer, waiting.loss, (x, y))
