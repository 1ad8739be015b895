# SPDX-License-Identifier: Apache-2.0
"""What losses compare with counts as `inputs`, wherever the loop makes it.

Bytes are computed from the batches' sizes; on the CPU, where `.to(device)` copies nothing, `clone` stands in for it.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy  # as programs do: nobody can replace this one
from torch.utils.data import DataLoader, TensorDataset

from opacus_memprof import hooks
from tests.integration.opacus_training import BATCH, CLASSES, LENGTH, attached, categories, cpu, prepare  # noqa: F401

pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:reduction. .mean. divides"),
    pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean"),
]

FLOAT, INT = 4, 8
FEATURES = 50

Loss = Callable[[Tensor, Tensor], Tensor]


def classes(n: int = BATCH) -> Tensor:
    return torch.randint(CLASSES, (n,))


def numbers(n: int = BATCH) -> Tensor:
    return torch.rand(n, CLASSES)


def signs(n: int = BATCH) -> Tensor:
    return torch.randint(2, (n, CLASSES)).float() * 2 - 1


def ctc(logits: Tensor, targets: Tensor) -> Tensor:
    steps = logits.log_softmax(-1).expand(4, *logits.shape)
    lengths = torch.full((len(targets),), 4)
    return functional.ctc_loss(steps, targets, lengths, torch.ones_like(lengths))


LOSSES: dict[str, tuple[Loss, Callable[[], Tensor]]] = {
    "CrossEntropyLoss": (nn.CrossEntropyLoss(), classes),
    "CrossEntropyLoss of probabilities": (nn.CrossEntropyLoss(label_smoothing=0.1), numbers),
    "cross_entropy": (functional.cross_entropy, classes),
    "cross_entropy, imported by name": (cross_entropy, classes),
    "nll_loss": (lambda logits, y: functional.nll_loss(logits.log_softmax(-1), y), classes),
    "MSELoss": (nn.MSELoss(), numbers),
    "mse_loss, by keyword": (lambda logits, y: functional.mse_loss(input=logits, target=y), numbers),
    "L1Loss": (nn.L1Loss(), numbers),
    "SmoothL1Loss": (nn.SmoothL1Loss(), numbers),
    "HuberLoss": (nn.HuberLoss(), numbers),
    "BCELoss": (lambda logits, y: nn.BCELoss()(logits.sigmoid(), y), numbers),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(), numbers),
    "KLDivLoss": (lambda logits, y: nn.KLDivLoss()(logits.log_softmax(-1), y), numbers),
    "torch.kl_div": (lambda logits, y: torch.kl_div(logits.log_softmax(-1), y).mean(), numbers),  # two arguments alone
    "torch.kl_div, by keyword": (lambda logits, y: torch.kl_div(logits.log_softmax(-1), target=y).mean(), numbers),
    "PoissonNLLLoss": (nn.PoissonNLLLoss(), numbers),
    "SoftMarginLoss": (nn.SoftMarginLoss(), signs),
    "HingeEmbeddingLoss": (nn.HingeEmbeddingLoss(), signs),
    "MultiMarginLoss": (nn.MultiMarginLoss(), classes),
    "MultiLabelMarginLoss": (nn.MultiLabelMarginLoss(), lambda: torch.full((BATCH, CLASSES), -1)),
    "CTCLoss": (ctc, lambda: torch.ones(BATCH, 1, dtype=torch.long)),
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, CLASSES))


@pytest.fixture
def network(cpu: None) -> Iterator[nn.Module]:  # noqa: F811
    built = model()
    attachment = hooks.attach_model(built)
    yield built
    attachment.detach()


@pytest.mark.parametrize("name", LOSSES)
def test_the_target_is_an_input(network: nn.Module, name: str) -> None:
    loss, labels = LOSSES[name]
    x, y = torch.randn(BATCH, FEATURES), labels()
    before = categories()

    def expect(result: Tensor, x_there: Tensor, y_there: Tensor) -> None:
        after = categories()
        assert after["inputs"] - before["inputs"] == x.numel() * FLOAT + y.numel() * y.element_size()
        assert after["unattributed"] == before["unattributed"]
        result.backward()

    def y_first() -> None:
        y_there, x_there = y.clone(), x.clone()
        expect(loss(network(x_there), y_there), x_there, y_there)

    def x_first() -> None:
        x_there, y_there = x.clone(), y.clone()
        expect(loss(network(x_there), y_there), x_there, y_there)

    def in_the_calls() -> None:
        result = loss(network(x_there := x.clone()), y_there := y.clone())
        expect(result, x_there, y_there)

    for order in (y_first, x_first, in_the_calls):
        order()


@pytest.mark.parametrize("mode", ["vanilla", "hooks", "functorch", "ew", "ghost"])
def test_in_every_mode(mode: str, cpu: None) -> None:  # noqa: F811
    training = prepare(mode)
    with attached(training):
        for tokens, labels in training.loader:
            before = categories()
            moved, there = tokens.clone(), labels.clone()
            loss = training.criterion(training.model(moved), there)
            after = categories()
            assert after["inputs"] - before["inputs"] == BATCH * LENGTH * INT + BATCH * INT
            assert after["unattributed"] == before["unattributed"]
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            del moved, there, loss


def test_batches_that_are_mappings_and_made_by_hand(network: nn.Module) -> None:
    for batch in [{"x": torch.randn(6, FEATURES), "labels": classes(6)} for _ in range(2)]:
        before = categories()
        moved = {name: tensor.clone() for name, tensor in batch.items()}
        functional.cross_entropy(network(moved["x"]), moved["labels"])
        assert categories()["inputs"] - before["inputs"] == 6 * FEATURES * FLOAT + 6 * INT
        del moved


def test_virtual_batches(cpu: None) -> None:  # noqa: F811
    training = prepare("hooks")
    sizes = []
    with (
        attached(training),
        BatchMemoryManager(data_loader=training.loader, max_physical_batch_size=3, optimizer=training.optimizer) as few,
    ):
        for tokens, labels in few:
            before = categories()
            moved, there = tokens.clone(), labels.clone()
            loss = training.criterion(training.model(moved), there)
            assert categories()["inputs"] - before["inputs"] == len(tokens) * (LENGTH + 1) * INT
            sizes.append(len(tokens))
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            del moved, there, loss
    assert sum(sizes) == 4 * BATCH
    assert max(sizes) == 3


def test_a_view_of_the_labels(network: nn.Module) -> None:
    x, y = torch.randn(BATCH, FEATURES), classes()
    before = categories()["inputs"]
    functional.cross_entropy(network(x), there := y.clone().view(-1, 1).squeeze(1))
    assert categories()["inputs"] - before == x.nbytes + there.nbytes


def test_targets_of_a_user_s_own_loss_stay_unattributed(network: nn.Module) -> None:
    x, y = torch.randn(BATCH, FEATURES), numbers()
    before = categories()
    moved, there = x.clone(), y.clone()
    loss = (network(moved) - there).square().mean()
    after = categories()
    assert after["unattributed"] - before["unattributed"] == y.numel() * FLOAT
    assert after["inputs"] - before["inputs"] == x.numel() * FLOAT
    loss.backward()


def test_what_autograd_holds_parameters_and_weights_of_classes_are_none(network: nn.Module) -> None:
    first, weights, x = network[0], torch.ones(CLASSES), torch.randn(BATCH, FEATURES)  # type: ignore[index]
    labels = classes()
    functional.cross_entropy(network(x), labels, weight=weights)
    before = categories()
    hidden = first(x)
    kept = functional.relu(hidden)  # its backward needs it
    losses = [
        functional.mse_loss(hidden, kept.detach()),
        functional.mse_loss(hidden, kept),
        functional.mse_loss(hidden[0], first.bias.data),
    ]
    after = categories()
    assert after["inputs"] == before["inputs"]
    assert after["model_parameters"] == before["model_parameters"]
    assert after["unattributed"] == before["unattributed"] >= CLASSES * FLOAT
    torch.stack(losses).sum().backward()


@pytest.mark.parametrize("mode", ["vanilla", "ghost"])
def test_logits_of_an_evaluation_are_none(mode: str, cpu: None) -> None:  # noqa: F811
    training = prepare(mode)
    with attached(training), torch.no_grad():
        tokens, labels = torch.zeros(BATCH, LENGTH, dtype=torch.long), classes()
        logits = training.model(tokens)
        before = categories()["inputs"]
        training.criterion(logits, labels)
        assert categories()["inputs"] - before == BATCH * INT


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_the_same(name: str) -> None:
    loss, labels = LOSSES[name]
    torch.manual_seed(0)
    network, x, y = model(), torch.randn(BATCH, FEATURES), labels()

    def once() -> list[Tensor]:
        network.zero_grad()
        result = loss(network(x), y)
        result.backward()
        return [result.detach(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)]

    plain = once()
    attachment = hooks.attach_model(network)
    followed = once()
    attachment.detach()
    assert len(plain) == 5
    assert all(map(torch.equal, plain, followed))


FUNCTIONS = ("cross_entropy", "mse_loss", "binary_cross_entropy_with_logits", "kl_div")


class Dispatched(Tensor):
    """Notes the functions that torch hands it."""

    seen: list[Any]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_torchs_public_functions_are_what_they_were() -> None:
    public = {name: getattr(functional, name) for name in FUNCTIONS}
    signatures = {name: inspect.signature(function) for name, function in public.items()}
    attachment = hooks.attach_model(nn.Linear(2, 2))
    for name, function in public.items():
        assert getattr(functional, name) is function
        assert inspect.signature(function) == signatures[name]
        assert pickle.loads(pickle.dumps(function)) is function
        Dispatched.seen = []
        function(torch.rand(3, 2).as_subclass(Dispatched), torch.rand(3, 2))
        assert Dispatched.seen[0] is function
    attachment.detach()


def test_function_transforms(network: nn.Module) -> None:
    x, y = torch.randn(BATCH, FEATURES), classes()
    logits = network(x).detach()
    samples = torch.func.vmap(lambda a, b: functional.cross_entropy(a[None], b[None]))(logits, y)
    assert samples.allclose(functional.cross_entropy(logits, y, reduction="none"))
    gradient = torch.func.grad(lambda z, t: functional.mse_loss(z, t), argnums=1)(logits, torch.zeros_like(logits))
    assert gradient.allclose(-2 * logits / logits.numel())


def several(x: Tensor, y: Tensor) -> Tensor:
    found = functional.cross_entropy(x, y) + functional.mse_loss(x, x.detach() + 1)
    direct = torch.binary_cross_entropy_with_logits(x, x.sigmoid(), None, None, 1) + torch._C._nn.l1_loss(x, x + 1)
    return found + direct


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripted_traced_and_compiled_losses() -> None:
    x, y = torch.randn(BATCH, CLASSES), classes()
    expected = several(x, y)
    torch._dynamo.reset()
    torch._dynamo.trace_rules.clear_lru_cache()  # as if nothing had been compiled before
    builtins = {name: getattr(torch._C._nn, name) for name in ("cross_entropy_loss", "mse_loss", "l1_loss")}

    attachment = hooks.attach_model(nn.Linear(2, 2))
    wrappers = [getattr(torch._C._nn, name) for name in builtins]
    assert not set(wrappers) & set(builtins.values())
    compiled = torch.compile(several, backend="aot_eager", fullgraph=True)
    scripted = torch.jit.script(several)
    assert all(kind.startswith(("aten::", "prim::")) for kind in (node.kind() for node in scripted.graph.nodes()))
    for way in (scripted, torch.jit.trace(several, (x, y)), compiled):
        assert way(x, y).allclose(expected)
    attachment.detach()

    assert builtins == {name: getattr(torch._C._nn, name) for name in builtins}
    assert not any(map(torch.jit._builtins._find_builtin, wrappers))
    torch._dynamo.reset()
    for way in (torch.jit.script(several), compiled, torch.compile(several, backend="eager", fullgraph=True)):
        assert way(x, y).allclose(expected)


def test_a_loader_without_a_device_copy_needs_no_loss(network: nn.Module) -> None:
    x, y = torch.randn(BATCH, FEATURES), classes()
    before = categories()
    batches = list(DataLoader(TensorDataset(x, y), batch_size=BATCH))
    functional.cross_entropy(network(batches[0][0]), batches[0][1])
    assert categories()["inputs"] - before["inputs"] == x.nbytes + y.nbytes
