# SPDX-License-Identifier: Apache-2.0
"""Blocks of unusual training loops are attributed to the right tensors.

The loops recreate optimizer states, compute gradients inside a forward, run forwards on other threads, evaluate, move
parameters, and fail in a step. The oracle is the tensor that a block belongs to, found by its address.
"""

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opacus_memprof
from opacus_memprof.analysis.events import ALLOC
from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.recording import native
from tests.event_rows import made_by_op, rows_of
from tests.integration.planted_findings import Training

pytestmark = [
    pytest.mark.usefixtures("clean_process"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]

BATCH, WIDTHS = 4, (24, 40, 56)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    first, second, third = WIDTHS
    return nn.Sequential(nn.Linear(first, second), nn.ReLU(), nn.Linear(second, third))


@pytest.fixture
def session(tmp_path: Path) -> Iterator[opacus_memprof.Session]:
    with opacus_memprof.profile(tmp_path, device="cpu") as running:
        yield running


def tags_of(tensors: Any) -> set[tuple[str, str]]:
    """The categories and modules of the blocks under tensors."""
    gc.collect()
    blocks = {block["address"]: (block["category"], block["module"]) for block in native.live_blocks()}
    return {blocks[tensor.untyped_storage().data_ptr()] for tensor in tensors}


def states(optimizer: Any) -> list[Tensor]:
    return [state for states in optimizer.state.values() for state in states.values() if state.dim()]


class OutOfPlace(torch.optim.Optimizer):
    """Momentum that is a new tensor after each update."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["momentum"] = 0.9 * state.get("momentum", 0.0) + parameter.grad
                parameter.sub_(group["lr"] * state["momentum"])


def clear(optimizer: Any) -> None:
    optimizer.state.clear()


def copy(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state.update({key: value.clone() for key, value in state.items()})


@pytest.mark.parametrize(
    ("kind", "between"),
    [(OutOfPlace, lambda optimizer: None), (torch.optim.Adam, clear), (torch.optim.Adam, copy)],
    ids=["new in each update", "cleared", "replaced by copies"],
)
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_states_that_are_others(
    mode: str, kind: type[torch.optim.Optimizer], between: Callable[[Any], None], session: Any
) -> None:
    training = Training(mlp(), mode, optimizer=kind)
    for _ in range(3):
        training.step(torch.randn(BATCH, WIDTHS[0]))
        assert tags_of(states(training.optimizer)) == {("optimizer_states", "0"), ("optimizer_states", "2")}
        between(training.optimizer.original_optimizer)


def test_moved_parameters(session: Any) -> None:
    training = Training(mlp())
    for _ in range(2):
        training.step(torch.randn(BATCH, WIDTHS[0]))
        training.model.double().float()
    training.model(torch.randn(BATCH, WIDTHS[0]))
    assert tags_of(training.model.parameters()) == {("model_parameters", "0"), ("model_parameters", "2")}


class Forces(nn.Module):
    """A feature that is a gradient with respect to inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTHS[0], WIDTHS[1]), nn.Linear(WIDTHS[1], WIDTHS[2])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        with torch.enable_grad():
            point = hidden.detach().requires_grad_()
            (force,) = torch.autograd.grad(point.pow(3).sum(), point)
        return torch.as_tensor(self.after(torch.tanh(hidden + force)))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_gradients_inside_a_forward(mode: str, session: Any) -> None:
    training = Training(Forces(), mode)
    for _ in range(2):
        output = training.model(torch.randn(BATCH, WIDTHS[0]))
        (captured,) = training.model._module.after.activations[0]
        assert tags_of([captured]) == {("activation_hooks_shared", "")}
        assert {block["phase"] for block in native.live_blocks() if block["bytes"] == captured.nbytes} == {"forward"}
        del captured
        training.criterion(output, torch.zeros(BATCH)).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()


@pytest.mark.parametrize("elsewhere", ["nothing", "no_grad", "training"])
def test_a_forward_on_another_thread(elsewhere: str, tmp_path: Path) -> None:
    """Autograd numbers the nodes of each thread from 0: those of one say nothing about those of another."""
    torch.manual_seed(0)
    model, scorer = mlp(), nn.Sequential(nn.Linear(WIDTHS[0], 8))

    def score() -> None:
        with torch.set_grad_enabled(elsewhere == "training"):
            scorer(torch.randn(BATCH, WIDTHS[0]))

    with opacus_memprof.profile(tmp_path, device="cpu") as session:
        session.attach(model)
        session.attach(scorer)
        for _ in range(2):
            loss = model(torch.randn(BATCH, WIDTHS[0])).sum()
            if elsewhere != "nothing":
                thread = threading.Thread(target=score)
                thread.start()
                thread.join()
            loss.backward()
            model.zero_grad()
    (found,) = made_by_op(tmp_path, "AddmmBackward0").values()  # without an optimizer, all is one step
    for name, width, features in (("0", WIDTHS[1], WIDTHS[0]), ("2", WIDTHS[2], WIDTHS[1])):
        assert found[name, 4 * width * features] == 2  # the weight's gradient
    assert {name for name, _ in found} == {"0", "2"}


@pytest.mark.parametrize("by_name", [False, True])
def test_an_update_after_its_closure(by_name: bool, session: Any) -> None:
    """What the update allocates is the optimizer's, although forward and backward have run since the step began."""
    model = mlp()

    def closure() -> Tensor:
        model.zero_grad()
        loss = model(torch.ones(BATCH, WIDTHS[0])).sum()
        loss.backward()
        return loss

    class Update(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = closure()
            self.temporary = torch.empty(1000)
            return loss

    update = Update(model.parameters(), lr=0.1)
    session.attach(model, update)
    loss = update.step(closure=closure) if by_name else update.step(closure)
    assert loss.item() == model(torch.ones(BATCH, WIDTHS[0])).sum().item()
    assert {category for category, _ in tags_of([update.temporary])} == {"optimizer_temporaries"}
    assert native.counters()["devices"]["cpu"]["categories"]["unattributed"] == 0


def test_after_an_evaluation_the_program_has_its_own(session: Any) -> None:
    training = Training(mlp())
    training.step(torch.randn(BATCH, WIDTHS[0]))
    with torch.no_grad():
        training.model(torch.randn(BATCH, WIDTHS[0]))
    best = {key: value.clone() for key, value in training.model.state_dict().items()}
    assert tags_of(best.values()) == {("unattributed", "")}


def test_a_teacher_s_forward_does_not_end_the_student_s(session: Any) -> None:
    student, teacher = mlp(), nn.Sequential(nn.Linear(WIDTHS[0], WIDTHS[2]))
    session.attach(student)
    session.attach(teacher)
    x = torch.randn(BATCH, WIDTHS[0])
    output = student(x)
    with torch.no_grad():
        target = teacher(x)
    difference = output - target
    assert tags_of([difference]) == {("forward_undecided", "")}


def refused(*_: Any) -> None:
    raise RuntimeError("refused")


def fail_forward(training: Training) -> Callable[[], None]:
    return training.model._module[0].register_forward_hook(refused).remove


def fail_pre_step(training: Training) -> Callable[[], None]:
    next(training.model.parameters()).register_post_accumulate_grad_hook(lambda p: setattr(p, "grad_sample", None))
    return lambda: None


def fail_noise(training: Training) -> Callable[[], None]:
    training.optimizer.generator = "none"
    return lambda: None


def fail_step(training: Training) -> Callable[[], None]:
    return training.optimizer.original_optimizer.register_step_pre_hook(refused).remove


@pytest.mark.parametrize("fail", [fail_forward, fail_pre_step, fail_noise, fail_step])
def test_after_a_failure_the_program_has_its_own(fail: Callable[[Training], Callable[[], None]], session: Any) -> None:
    training = Training(mlp())
    training.step(torch.randn(BATCH, WIDTHS[0]))
    repair = fail(training)
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        training.step(torch.randn(BATCH, WIDTHS[0]))
    repair()
    training.optimizer.zero_grad()
    assert tags_of([torch.randn(1000)]) == {("unattributed", "")}


class Hidden(nn.Module):
    """Returns its hidden states as well, of which autograd needs none: the second layer's weight is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTHS[0], WIDTHS[1]), nn.Linear(WIDTHS[1], WIDTHS[2])
        self.second.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        hidden = self.first(x)
        return self.second(hidden), [hidden]


def test_what_only_the_program_holds_is_not_autograd_s(session: Any) -> None:
    training = Training(Hidden())
    _, (hidden,) = training.model(torch.randn(BATCH, WIDTHS[0]))
    assert tags_of([hidden]) == {("activation_hooks_opacus_only", "first")}
    scaled = hidden.square()  # autograd saves it
    native.settle_all([hidden, scaled])
    assert tags_of([hidden]) == {("activation_hooks_shared", "first")}


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_noise_belongs_to_the_parameter_s_module(mode: str, tmp_path: Path) -> None:
    with opacus_memprof.profile(tmp_path, device="cpu") as session:
        session.attach(opacus_memprof.PrivacyEngine)
        Training(mlp(), mode).step(torch.randn(BATCH, WIDTHS[0]))
    rows, names = rows_of(tmp_path)
    noise = Counter(
        (names.module(row["module"]), int(row["bytes"]))
        for row in rows
        if row["kind"] == ALLOC and names.category(row["category"]) == "noise"
    )
    layers = (("0", WIDTHS[1], WIDTHS[0]), ("2", WIDTHS[2], WIDTHS[1]))
    shapes = [(name, numel) for name, width, features in layers for numel in (width * features, width)]
    assert noise == {(name, 4 * numel): 2 for name, numel in shapes}  # zeros first, which are thrown away


def test_states_have_their_module_while_the_first_step_makes_them(tmp_path: Path) -> None:
    """The peak is in the first update, which makes the states outside of every module."""
    with opacus_memprof.profile(tmp_path, device="cpu") as session:
        session.attach(opacus_memprof.PrivacyEngine)
        Training(mlp(), "ghost", optimizer=torch.optim.AdamW).step(torch.randn(1, WIDTHS[0]))
    peak = load_profile(tmp_path)["devices"]["cpu"]["peak"]
    assert peak["phase"] == "optimizer_step"
    trained = {"0": WIDTHS[1] * (WIDTHS[0] + 1), "2": WIDTHS[2] * (WIDTHS[1] + 1)}
    steps = 2 * 4  # of two parameters, counted in 4 bytes each
    found = {name: categories.get("optimizer_states") for name, categories in peak["modules"].items()}
    assert {name: found.get(name) for name in trained} == {name: 2 * 4 * n + steps for name, n in trained.items()}
    assert not found.get("")
