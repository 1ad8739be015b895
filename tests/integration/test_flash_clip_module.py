# SPDX-License-Identifier: Apache-2.0
"""What flash_clip keeps from backward to the step, and in which type; else its module is the model."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from opacus_memprof.clipping.layers import GenericLayer
from opacus_memprof.clipping.proof.prover import Prover
from tests.exactness.program import rounded_anew
from tests.integration.flash_clip_models import (
    Transformer,
    convnet,
    criterion,
    image_data,
    make_private,
    mlp,
    token_data,
    train,
    vector_data,
)


def test_no_weight_gradients_are_formed_by_autograd() -> None:
    torch.manual_seed(0)
    module, optimizer, _ = make_private(Transformer().double(), token_data(8), "flash_clip", flash_clip_passes=1)
    ids, target = token_data(4).tensors
    criterion("mean")(module(ids), target).backward()
    assert all(p.requires_grad and p.grad is None for p in module.parameters())
    optimizer.step()
    assert all(p.grad is not None for p in module.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None and p.summed_grad is None for p in module.parameters())


def test_the_smaller_is_kept_until_the_step_ends() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 50), nn.Linear(50, 50, bias=False)).double()
    module, optimizer, _ = make_private(model, vector_data(8), "flash_clip", flash_clip_passes=1)
    module(torch.randn(4, 7, 6, dtype=torch.float64)).square().sum((1, 2)).mean().backward()
    shapes = [
        (category, name, tuple(t.shape))
        for category, name, t in module.bookkeeping.kept_tensors()
        if category[:4] != "norm"
    ]
    assert sorted(shapes) == [
        ("activation_hooks", "1", (4, 7, 50)),  # 7 (50 + 50) elements a sample against 50 x 50
        ("backprop_copies", "1", (4, 7, 50)),
        ("per_sample_gradients", "0", (4, 50)),
        ("per_sample_gradients", "0", (4, 50, 6)),  # 50 x 6 against 7 (50 + 6)
    ]
    optimizer.step()
    assert list(module.bookkeeping.kept_tensors()) == []


def test_two_passes_keep_norms_only() -> None:
    torch.manual_seed(0)
    module, _, _ = make_private(Transformer().double(), token_data(8), "flash_clip", flash_clip_passes=2)
    ids, target = token_data(4).tensors
    criterion("mean")(module(ids), target).backward()
    assert {category for category, _, _ in module.bookkeeping.kept_tensors()} == {"norm_samples"}


@pytest.mark.parametrize("passes", [1, 2])
def test_autocast_keeps_what_was_computed_with(passes: int) -> None:
    """Parameters stay float32; linear layers run, and are booked, in bfloat16; norms are float32."""
    torch.manual_seed(0)
    model, data = Transformer(), token_data(12)
    results = []
    for mode in ("hooks", "flash_clip"):
        options = {"flash_clip_passes": passes} if mode == "flash_clip" else {}
        module, optimizer, _ = make_private(copy.deepcopy(model), data, mode, noise_multiplier=0.0, **options)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = criterion("mean")(module(data.tensors[0]), data.tensors[1])
        loss.backward()
        if mode == "flash_clip" and passes == 1:
            tensors = list(module.bookkeeping.kept_tensors())
            assert {t.dtype for category, _, t in tensors if category == "norm_samples"} == {torch.float32}
            inputs = {name: t.dtype for category, name, t in tensors if category == "activation_hooks"}
            assert inputs.pop("tokens") == torch.int64
            assert inputs.keys() >= {"blocks.0.qkv", "blocks.1.up"}
            assert set(inputs.values()) == {torch.bfloat16}
        optimizer.step()
        results.append({n: p.grad.clone() for n, p in module.named_parameters()})
    for name, expected in results[0].items():
        assert results[1][name].dtype == torch.float32
        assert float((results[1][name] - expected).norm() / expected.norm()) < 0.02, name


class RoundedAnewMlp(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rounded_anew(super().forward(x))


def test_rounding_that_is_new_in_each_run_repeats_no_module() -> None:
    """Kernels with atomic operations round so, and layers that a proof doubts are repeated, which is slow."""
    torch.manual_seed(0)
    private = make_private(RoundedAnewMlp(*mlp()).double(), vector_data(12), "flash_clip")
    train(private, steps=3)
    assert not any(isinstance(layer, GenericLayer) for layer in private[0].registry.layers())


def test_a_check_that_fails_is_followed_by_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check runs a part of the batch, and the proof after it the whole batch."""
    torch.manual_seed(0)
    private = make_private(mlp().double(), vector_data(64), "flash_clip")
    train(private, steps=1)
    failed: list[int] = []
    monkeypatch.setattr(Prover, "is_mixing", lambda self, digit: not failed.append(self.program.batch))
    train(private, steps=2)
    assert failed
    assert failed[0] < private[0].layer_hooks.batch
    assert private[0].last_situation.share == 1


class Records:
    def __init__(self) -> None:
        self.calls = 0
        self.by_kind = {"calls": [0]}


class Counting(nn.Module):
    """Counts its calls in one of the ways in which modules keep a state."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(9, 3)
        self.how = how
        self.register_buffer("registered", torch.zeros(()))
        self.tensor, self.tensors = torch.zeros(()), [torch.zeros(())]
        self.array = numpy.zeros(2)
        self.log: defaultdict[str, list[int]] = defaultdict(list)
        self.counter: Counter[str] = Counter()
        self.ordered: OrderedDict[int, int] = OrderedDict()
        self.records, self.names = Records(), SimpleNamespace(calls=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.how:
            case "registered anew":
                self.registered = self.registered + 1
            case "tensor":
                self.tensor += 1
            case "list of tensors":
                self.tensors[0] += 1
            case "array":
                self.array += 1
            case "dict of lists":
                self.log["calls"].append(1)
            case "counter":
                self.counter["calls"] += 1
            case "ordered dict":
                self.ordered[len(self.ordered)] = 1
            case "object":
                self.records.calls += 1
            case "object's dict":
                self.records.by_kind["calls"][0] += 1
            case "namespace":
                self.names.calls += 1
        output: torch.Tensor = self.linear(x)
        return output * (1 + self.count() / 8)

    def count(self) -> float:
        counts = (float(self.registered), float(self.tensor), float(self.tensors[0]), float(self.array[0]))
        numbers = (len(self.log["calls"]), self.counter["calls"], len(self.ordered), self.names.calls)
        return sum(counts) + sum(numbers) + self.records.calls + self.records.by_kind["calls"][0]


@pytest.mark.parametrize(
    "how",
    [
        "registered anew",
        "tensor",
        "list of tensors",
        "array",
        "dict of lists",
        "counter",
        "ordered dict",
        "object",
        "object's dict",
        "namespace",
    ],
)
def test_proofs_leave_what_a_forward_writes(how: str) -> None:
    torch.manual_seed(0)
    model = Counting(how).double()
    plain = copy.deepcopy(model)
    module, optimizer, _ = make_private(model, vector_data(8), "flash_clip")
    for step in range(1, 4):
        x = torch.randn(4, 9, dtype=torch.float64)
        output = module(x)
        assert model.count() == step
        with torch.no_grad():
            plain.linear.load_state_dict(model.linear.state_dict())
            assert torch.equal(output, plain(x))
        output.square().sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("is_buffer", [False, True])
@pytest.mark.parametrize(
    "build",
    [
        torch.Tensor.to_sparse,
        torch.Tensor.to_sparse_csr,
        lambda x: torch.nested.nested_tensor([x[0], x[1, :2]]),
        lambda x: x.to("meta"),
    ],
    ids=["sparse", "csr", "nested", "meta"],
)
def test_a_module_holds_a_tensor_of_another_kind(
    build: Callable[[torch.Tensor], torch.Tensor], is_buffer: bool
) -> None:
    """As a graph's adjacency matrix, which no forward writes to."""
    torch.manual_seed(0)
    model = mlp().double()
    held = build(torch.eye(9, dtype=torch.float64))
    model.register_buffer("held", held) if is_buffer else setattr(model, "held", held)
    module, optimizer, _ = make_private(model, vector_data(8), "flash_clip")
    x, target = vector_data(4).tensors
    criterion("mean")(module(x), target).backward()
    optimizer.step()


def test_evaluation_is_untouched() -> None:
    torch.manual_seed(0)
    model = convnet().double()
    x, _ = image_data(3).tensors
    expected = model(x)
    module, _, _ = make_private(model, image_data(8), "flash_clip")
    assert torch.equal(module(x), expected)
    with torch.no_grad():
        assert torch.equal(module(x), expected)
        assert not module(x).requires_grad
    assert torch.equal(module.eval()(x), expected)


def test_modules_are_copied_pickled_and_unwrapped() -> None:
    torch.manual_seed(0)
    model, data = mlp().double(), vector_data(12)
    private = make_private(model, data, "flash_clip")
    train(private, steps=1)
    module = private[0]
    x, _ = data.tensors
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), module(x))
    bare = module.to_standard_module()
    assert bare is model
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in bare.modules())
    bare(x).sum().backward()
    assert all(p.grad is not None for p in bare.parameters())


def test_a_program_that_ends_after_its_first_steps_prints_nothing(tmp_path: Path) -> None:
    """What follows the program until the next call is on where Python ends, which has no modules any more then."""
    script = tmp_path / "short.py"
    script.write_text(
        "from tests.integration.flash_clip_models import make_private, mlp, train, vector_data\n"
        "private = make_private(mlp().double(), vector_data(8), 'flash_clip')\n"
        "train(private, steps=1)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-W", "ignore", str(script)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stderr == ""


def test_a_private_model_is_freed() -> None:
    """A parameter's hook, which is in a C++ object that Python's garbage collector does not see into, holds nothing."""
    private = make_private(mlp().double(), vector_data(8), "flash_clip")
    train(private)
    module, optimizer, loader = private
    assert all(p._post_accumulate_grad_hooks for p in module.parameters())
    gone = [weakref.ref(each) for each in (module, optimizer, next(module.parameters()))]
    del private, module, optimizer, loader
    gc.collect()
    assert [each() for each in gone] == [None, None, None]
