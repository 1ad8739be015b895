# SPDX-License-Identifier: Apache-2.0
"""A forward pass on fake tensors keeps what the real one keeps, and leaves no trace in the model."""

import copy
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus import GradSampleModule
from torch import Tensor, nn

import opacus_memprof
from opacus_memprof.hooks.fake_forward import FakeForward
from opacus_memprof.recording import observations
from tests.planted_models import Transformer, ValueDependent, adapters, convolutions, llama

pytestmark = pytest.mark.usefixtures("clean_process")
TEXT = {"vocabulary": 100, "width": 32, "heads": 4, "blocks": 3, "length": 16}


class Remembering(nn.Module):
    """Its forward changes the model, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)
        self.second.weight = self.first.weight
        self.calls = 0
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        random.random()
        y = self.dropout(torch.relu(self.first(x))) * scale + torch.rand(8)
        self.outputs.append(y.detach())
        return self.second(y)


class Checkpointed(Transformer):
    checkpoints = True


def whole_forward() -> Any:
    return observations.layer_shapes().whole_forward()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("build", [Transformer, llama, Checkpointed], ids=lambda build: build.__name__)
def test_it_keeps_what_the_real_one_keeps(
    build: Callable[[dict[str, int]], nn.Module], private: bool, autocast: bool, tmp_path: Path
) -> None:
    ids = torch.zeros(4, 16, dtype=torch.long)
    compare(build(TEXT), ids, private, autocast, tmp_path)


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (convolutions({"channels": 8, "out": 4}), (4, 3, 16, 16)),
        (adapters({"in": 16, "rank": 2, "out": 4, "layers": 2}), (4, 8, 16)),
    ],
    ids=["convolutions", "adapters"],
)
def test_of_images_and_adapters(model: nn.Module, shape: tuple[int, ...], private: bool, tmp_path: Path) -> None:
    compare(copy.deepcopy(model), torch.randn(shape), private, False, tmp_path)


def compare(model: nn.Module, inputs: Tensor, private: bool, autocast: bool, directory: Path) -> None:
    """Compares with what the allocator counts after the real forward.

    Autograd wraps each number that it saves in a tensor of 8 bytes, which no operation allocates: in these models one
    for each of three blocks.
    """
    made = GradSampleModule(model) if private else model
    with opacus_memprof.profile(directory, device="cpu") as session:
        session.attach(made)
        before = kept_bytes(session)
        with torch.autocast("cpu", torch.bfloat16, autocast):
            output = made(inputs)
            found = whole_forward()
        real = kept_bytes(session) - before
        assert output.requires_grad
    assert found is not None
    rng_states = 3 * torch.get_rng_state().nbytes if isinstance(model, Checkpointed) else 0  # of each block
    assert real - sum(found.kept.values()) - rng_states in (0, 24)
    assert all(found.largest[name] <= size for name, size in found.kept.items())


def kept_bytes(session: Any) -> int:
    live = session.breakdown()["cpu"]
    return sum(live.get(name, 0) for name in ("activations", "activation_hooks", "forward_undecided"))


def test_it_leaves_no_trace(tmp_path: Path) -> None:
    model = Remembering()
    hook_calls: list[Any] = []
    model.first.register_forward_hook(lambda *_: hook_calls.append(1))
    x = torch.randn(3, 8)
    with opacus_memprof.profile(tmp_path, device="cpu") as session:
        session.attach(model)
        model(x, scale=2.0)
        states = torch.get_rng_state(), random.getstate()
        keys = {name: list(vars(module)) for name, module in model.named_modules()}
        parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
        found = whole_forward()
        assert found is not None
        assert set(found.forwards) == {"first", "second"}
        assert found.forwards["second"].input_bytes == 3 * 8 * 4
        assert (model.calls, len(model.outputs), len(hook_calls)) == (1, 1, 1)
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert {name: list(vars(module)) for name, module in model.named_modules()} == keys
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters


@pytest.mark.parametrize(
    "inputs",
    [((torch.zeros(2, 16, dtype=torch.long),), {}), ((object(),), {}), None],
    ids=["values", "objects", "none"],
)
def test_what_cannot_be_repeated(inputs: Any) -> None:
    model = ValueDependent(TEXT)
    forward = FakeForward(list(model.named_modules()))
    if inputs is not None:
        forward.record_inputs(inputs)
    assert forward.run((), captures=False) is None


class TimeEmbedding(nn.Module):
    """Makes float32 features of integers itself, and multiplies them with its weights."""

    def __init__(self, *, casts: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.casts = nn.Linear(8, 8), nn.BatchNorm1d(8), casts

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        features = t[:, None].float() * torch.linspace(0, 1, 8)
        features = features.to(self.linear.weight.dtype) if self.casts else features
        return self.norm(self.linear(features)) + x


@pytest.mark.parametrize("casts", [True, False])
def test_another_data_type_is_tried_without_memory(casts: bool) -> None:
    model, x, t = TimeEmbedding(casts=casts), torch.randn(2, 8), torch.arange(2)
    forward = FakeForward(list(model.named_modules()))
    assert forward.runs_in("bfloat16"), "nothing is known before the first forward pass"
    forward.record_inputs(((x, t), {}))
    found = forward.runs_in("bfloat16")
    assert forward.runs_in("float32")
    assert model.linear.weight.dtype == torch.float32
    try:
        copy.deepcopy(model).to(torch.bfloat16)(x.bfloat16(), t)
    except RuntimeError:
        assert not found
        assert not casts
    else:
        assert found
        assert casts


def test_one_of_several_ranks_repeats_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its collectives would wait for the other ranks."""
    model = Transformer(TEXT)
    forward = FakeForward(list(model.named_modules()))
    forward.record_inputs(((torch.zeros(2, 16, dtype=torch.long),), {}))
    assert forward.run((), captures=False) is not None
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    forward.record_inputs(((torch.zeros(2, 16, dtype=torch.long),), {}))
    assert forward.run((), captures=False) is None


def test_it_keeps_no_model_alive() -> None:
    model = Transformer(TEXT)
    forward = FakeForward(list(model.named_modules()))
    forward.record_inputs(((torch.zeros(2, 16, dtype=torch.long),), {}))
    del model
    assert forward.run((), captures=False) is None


LATER = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from opacus_memprof.hooks.fake_forward import FakeForward

layer = torch.nn.Linear(3, 2)
forward = FakeForward([("", layer)])
forward.record_inputs(((torch.zeros(4, 3),), {}))
assert forward.run([""], captures=False) is not None
with FakeTensorMode():
    print(tuple(torch.empty(5).shape))
"""


def test_the_program_can_use_fake_tensors_later() -> None:
    """Torch 2.11 without a GPU crashes where the thread has ended that was the first to use them."""
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "(5,)\n"), done.stderr


class FrozenHead(nn.Module):
    """A trained layer between plain operations and a frozen head, whose own operations no layer's name leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 32).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.first(x))
        y = y + self.second(y)
        return self.head(torch.sigmoid(y))


def test_a_block_belongs_to_the_layer_that_is_called_next() -> None:
    model = FrozenHead()
    forward = FakeForward(list(model.named_modules()))
    forward.record_inputs(((torch.zeros(4, 8),), {}))
    found = forward.run(("first", "second"), captures=False)
    assert found is not None
    sizes = {(block.module, block.layer): block.bytes for block in found.blocks}
    assert sizes == {("", "second"): 4 * 16 * 4, ("", None): 4 * 16 * 4, ("head", None): 4 * 32 * 4}
    assert [block.bytes for block in found.blocks if block.is_output] == [4 * 32 * 4]
    assert found.added == {"second"}
    assert found.samples == 4
    # In the head both results of sigmoids are saved, and a variable refers to the sum.
    assert found.peak == 3 * 4 * 16 * 4 + 4 * 32 * 4


def test_a_capture_that_autocast_casts_is_kept_by_opacus_alone() -> None:
    model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 4))
    forward = FakeForward(list(model.named_modules()))
    with torch.autocast("cpu", torch.bfloat16):
        forward.record_inputs(((torch.zeros(4, dtype=torch.long),), {}))
    found = forward.run(("0", "1"), captures=True)
    assert found is not None
    assert [(block.module, block.bytes) for block in found.blocks if block.captor == "1"] == [("0", 4 * 16 * 4)]


class Contrastive(nn.Module):
    """Compares all samples of two views with one another, or each with as many classes as the batch has samples."""

    def __init__(self, classes: int = 0) -> None:
        super().__init__()
        self.embed, self.classify = nn.Linear(8, 16), nn.Linear(16, classes) if classes else None

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        first, second = self.embed(one), self.embed(other)
        return first @ second.t() if self.classify is None else self.classify(first * second)


@pytest.mark.parametrize(("classes", "mixes"), [(0, True), (5, False)])
def test_a_matrix_of_samples_by_samples_is_told_from_as_many_classes(classes: int, mixes: bool) -> None:
    model, inputs = Contrastive(classes), (torch.randn(5, 8), torch.randn(5, 8))
    assert model(*inputs).shape == (5, 5)
    forward = FakeForward(list(model.named_modules()))
    forward.record_inputs((inputs, {}))
    assert forward.mixes_samples(5) is mixes


class Scored(nn.Module):
    """Weighs tokens by scores that are products of queries and keys, or sums, as in graph attention."""

    def __init__(self, products: bool) -> None:
        super().__init__()
        self.products, self.query, self.key = products, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.query(x), self.key(x)
        if self.products:
            scores = (query @ key.transpose(1, 2) / 3).masked_fill(torch.ones(6, 6).triu(1) > 0, -1e9)
        else:
            scores = (query.unsqueeze(2) + key.unsqueeze(1)).sum(-1)
        return torch.dropout(scores.softmax(-1), 0.5, True) @ x


@pytest.mark.parametrize("products", [False, True])
def test_a_softmax_of_products_is_told_from_that_of_sums(products: bool) -> None:
    model = Scored(products)
    forward = FakeForward(list(model.named_modules()))
    forward.record_inputs(((torch.randn(2, 6, 8),), {}))
    whole = forward.run(("query", "key"), captures=False)
    assert whole is not None
    assert [block.is_attention for block in whole.blocks if block.is_softmax] == [products]
