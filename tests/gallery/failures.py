# SPDX-License-Identifier: Apache-2.0
"""Programs after reports of Opacus' users: each fails, wastes memory or trains wrongly, and is cured by an edit.

A program takes the session, and whether the first advice of its profile has been followed.
"""

import copy
import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator
from opacus.validators.errors import UnsupportedModuleError
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import opacus_memprof

TRACKER = "https://github.com/meta-pytorch/opacus/issues/"
SAMPLES, BATCH, CLASSES, WIDTH, TOKENS = 32, 4, 5, 16, 6


@dataclass(frozen=True)
class Report:
    """A user's report.

    Attributes:
        link: to the report.
        program: the program, which takes whether it is cured.
        kind: of the first finding.
        evidence, remedy: what these say.
        error: the exception that ends the program as it is, if one does.
        flash_clip: whether the remedy offers flash_clip, under which the program as it is trains.
    """

    link: str
    program: Callable[..., None]
    kind: str
    evidence: tuple[str, ...]
    remedy: str
    error: type[Exception] | None = None
    flash_clip: bool = False

    def __str__(self) -> str:
        return f"{self.program.__name__}"


# --- what the programs share ---


def private(
    model: nn.Module, inputs: Tensor, mode: str = "hooks", *, poisson: bool = False, trained: Any = None, **options: Any
) -> Any:
    """What make_private returns, and the optimizer that it was given."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(trained or [p for p in model.parameters() if p.requires_grad], lr=0.1)
    labels = torch.arange(len(inputs)) % CLASSES
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = opacus_memprof.PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(inputs, labels), batch_size=BATCH),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=poisson,
            grad_sample_mode=mode,
            **options,
        )
    return *made, optimizer


def train(model: Any, optimizer: Any, loader: Any, *, clears: Any = None) -> None:
    for x, y in loader:
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        (optimizer if clears is None else clears).zero_grad()


def vectors() -> Tensor:
    return torch.randn(SAMPLES, WIDTH)


def sequences() -> Tensor:
    return torch.randn(SAMPLES, TOKENS, WIDTH)


def mlp(*, inplace: bool = False) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=inplace), nn.Linear(WIDTH, CLASSES))


# --- training that is not private ---


def own_optimizer_steps(cured: bool, mode: str = "hooks") -> None:
    """The program goes on with the optimizer that it gave to make_private."""
    model, dp_optimizer, loader, own = private(mlp(), vectors())
    train(model, dp_optimizer if cured else own, loader)


def new_optimizer_steps(cured: bool, mode: str = "hooks") -> None:
    """The program makes another optimizer after make_private."""
    model, dp_optimizer, loader, _ = private(mlp(), vectors())
    train(model, dp_optimizer if cured else torch.optim.Adam(model.parameters()), loader)


def returned_objects_dropped(cured: bool, mode: str = "hooks") -> None:
    """What make_private returns is dropped; with Poisson sampling, Opacus refuses the second backward pass."""
    model, *returned, own = private(mlp(), vectors(), poisson=True)
    kept = returned if cured else [own, DataLoader(TensorDataset(vectors(), torch.arange(SAMPLES) % CLASSES), BATCH)]
    del returned
    train(model, *kept)


def batch_norm(cured: bool, mode: str = "hooks") -> None:
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES))
    if cured:
        model = ModuleValidator.fix(model)
    model, optimizer, loader, _ = private(model, vectors())
    train(model, optimizer, loader)


def optimizer_before_the_fix(cured: bool, mode: str = "hooks") -> None:
    """The optimizer is made first, and has parameters of layers that have been replaced since."""
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES))
    parameters = None if cured else list(model.parameters())
    model, optimizer, loader, _ = private(ModuleValidator.fix(model), vectors(), trained=parameters)
    train(model, optimizer, loader)


def own_criterion_in_ghost(cured: bool, mode: str = "ghost") -> None:
    """The program computes its loss with the criterion that it gave to make_private."""
    given = nn.CrossEntropyLoss()
    model, optimizer, criterion, loader, _ = private(mlp(), vectors(), "ghost", criterion=given)
    for x, y in loader:
        (criterion if cured else given)(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


# --- per-sample gradients that nobody clears ---


def trained_beside_the_optimizer(cured: bool, mode: str = "hooks", *, poisson: bool = False) -> None:
    """Only the head is trained, and the body is not frozen."""
    model = mlp()
    if cured:
        model[0].requires_grad_(False)
    model, optimizer, loader, _ = private(model, vectors(), poisson=poisson, trained=list(model[2].parameters()))
    train(model, optimizer, loader)


def trained_beside_with_poisson(cured: bool, mode: str = "hooks") -> None:
    trained_beside_the_optimizer(cured, poisson=True)


def no_zero_grad(cured: bool, mode: str = "hooks", *, poisson: bool = True) -> None:
    model, optimizer, loader, _ = private(mlp(), vectors(), poisson=poisson)
    for x, y in loader:
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if cured:
            optimizer.zero_grad()


def discriminator(cured: bool, mode: str = "hooks") -> None:
    """A discriminator's backward passes of real and fake samples."""
    model, optimizer, loader, _ = private(nn.Linear(WIDTH, 1), vectors(), poisson=True)
    for x, _ in loader:
        fake = torch.randn_like(x)
        optimizer.zero_grad()
        if cured:
            labels = torch.cat([torch.ones(len(x), 1), torch.zeros(len(x), 1)])
            functional.binary_cross_entropy_with_logits(model(torch.cat([x, fake])), labels).backward()
        else:
            functional.binary_cross_entropy_with_logits(model(x), torch.ones(len(x), 1)).backward()
            functional.binary_cross_entropy_with_logits(model(fake), torch.zeros(len(x), 1)).backward()
        optimizer.step()


def accumulated_by_hand(cured: bool, mode: str = "hooks") -> None:
    """Gradients of four batches are accumulated, and Poisson sampling allows none."""
    model, optimizer, loader, _ = private(mlp(), vectors(), poisson=True)
    if cured:
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=BATCH, optimizer=optimizer) as parts:
            train(model, optimizer, parts)
        return
    for index, (x, y) in enumerate(loader):
        functional.cross_entropy(model(x), y).backward()
        if index % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def accumulated_in_ghost(cured: bool, mode: str = "ghost") -> None:
    """Gradients of four batches are accumulated in ghost clipping, which keeps those of the last one."""
    model, optimizer, criterion, loader, _ = private(mlp(), vectors(), "ghost", criterion=nn.CrossEntropyLoss())
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=BATCH, optimizer=optimizer) as parts:
        for index, (x, y) in enumerate(parts if cured else loader):
            criterion(model(x), y).backward()
            if cured or index % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()


def generator_before_zero_grad(cured: bool, mode: str = "hooks") -> None:
    """A generator's backward pass stands between the discriminator's step and its zero_grad in the next batch."""
    model, optimizer, loader, _ = private(mlp(), vectors(), poisson=True)
    generator = nn.Linear(WIDTH, WIDTH)
    for x, y in islice(loader, 2):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if cured:
            optimizer.zero_grad()
        functional.cross_entropy(model(generator(torch.randn_like(x))), y).backward()


# --- memory that nobody uses ---


def evaluation_keeps_graphs(cured: bool, mode: str = "hooks") -> None:
    """The outputs of an evaluation are collected with their graphs, and are live in the next epoch."""
    model, optimizer, loader, _ = private(mlp(), vectors())
    outputs = []
    for _ in range(2):
        train(model.train(), optimizer, loader)
        with torch.set_grad_enabled(not cured):
            outputs = [model.eval()(torch.randn(200, WIDTH)) for _ in range(4)]
    train(model.train(), optimizer, loader)
    assert len(outputs) == 4


def acting_with_captures(cured: bool, mode: str = "hooks") -> None:
    """An agent chooses its actions with the private model in training mode, as Opacus' hooks capture it."""
    model, optimizer, loader, _ = private(mlp(), vectors())
    for x, y in loader:
        with torch.set_grad_enabled(not cured):
            model(x[:1]).argmax()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def generator_pass(cured: bool, mode: str = "hooks") -> None:
    """A generator's backward pass goes through the private discriminator, which computes samples' gradients again."""
    model, optimizer, loader, _ = private(mlp(), vectors())
    generator = nn.Linear(WIDTH, WIDTH)
    generator_optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
    for x, y in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        generator_optimizer.zero_grad()
        if cured:
            model.disable_hooks()
        functional.cross_entropy(model(generator(torch.randn_like(x))), y).backward()
        if cured:
            model.enable_hooks()
        generator_optimizer.step()


def evaluation_beside_gradients(cured: bool, mode: str = "hooks") -> None:
    """Gradients are cleared before each batch, and so are live in the evaluation after the last one."""
    model, optimizer, loader, _ = private(mlp(), vectors())
    for x, y in loader:
        if not cured:
            optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if cured:
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model(torch.randn(1000, WIDTH))


def repeated_runs(cured: bool, mode: str = "hooks") -> None:
    """Trainings one after the other, as a cell of a notebook that is run again."""
    gc.disable()  # when Python collects by itself is no part of the case
    try:
        for _ in range(3):
            model, optimizer, loader, own = private(mlp(), vectors())
            train(model, optimizer, loader)
            if cured:
                del model, optimizer, loader, own
                gc.collect()
    finally:
        gc.enable()


# --- samples that get lost ---


class Text(nn.Module):
    """The positions of GPT-2's embedding are the same for all samples, and have one row."""

    def __init__(self, *, expands: bool) -> None:
        super().__init__()
        self.expands = expands
        self.tokens, self.positions = nn.Embedding(20, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(TOKENS)[None]
        positions = positions.expand(len(ids), -1) if self.expands else positions
        return self.head((self.tokens(ids) + self.positions(positions)).mean(1))


class Flattened(nn.Module):
    """A layer gets batch and tokens in one dimension."""

    def __init__(self, *, flattens: bool) -> None:
        super().__init__()
        self.flattens = flattens
        self.encoder, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, WIDTH) if self.flattens else x
        return self.head(self.encoder(flat).view(x.shape).mean(1))


class Beside(nn.Module):
    """Layers in a forward that leaves some out, uses a weight only, or writes in place."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.way == "functional":
            y = functional.linear(y, self.other.weight, self.other.bias)
        elif self.way == "in place":
            y += x
            y = self.other(y)
        elif self.way != "unused":
            y = self.other(y + x)
        return self.head(torch.relu(y))


def broadcast_positions(cured: bool, mode: str = "hooks") -> None:
    ids = torch.randint(20, (SAMPLES, TOKENS))
    model, optimizer, loader, _ = private(Text(expands=cured), ids, mode)
    train(model, optimizer, loader)


def flattened_tokens(cured: bool, mode: str = "hooks") -> None:
    model, optimizer, loader, _ = private(Flattened(flattens=not cured), sequences(), mode)
    train(model, optimizer, loader)


def weight_used_elsewhere(cured: bool, mode: str = "hooks") -> None:
    model, optimizer, loader, _ = private(Beside("called" if cured else "functional"), vectors(), mode)
    train(model, optimizer, loader)


def unused_layer(cured: bool, mode: str = "hooks") -> None:
    model = Beside("unused")
    model.other.requires_grad_(not cured)
    model, optimizer, loader, _ = private(model, vectors())
    train(model, optimizer, loader)


def unused_layer_in_ghost(cured: bool, mode: str = "ghost") -> None:
    """Ghost clipping has no norms of a layer that no gradient reaches."""
    model = Beside("unused")
    model.other.requires_grad_(not cured)
    model, optimizer, criterion, loader, _ = private(model, vectors(), mode, criterion=nn.CrossEntropyLoss())
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def layer_in_eval_mode(cured: bool, mode: str = "hooks") -> None:
    model, optimizer, loader, _ = private(Beside("called"), vectors())
    if not cured:
        model._module.other.eval()
    train(model, optimizer, loader)


# --- operations in place ---


def in_place_activation(cured: bool, mode: str = "hooks") -> None:
    model, optimizer, loader, _ = private(mlp(inplace=not cured), vectors(), mode)
    train(model, optimizer, loader)


def in_place_residual(cured: bool, mode: str = "hooks") -> None:
    model, optimizer, loader, _ = private(Beside("called" if cured else "in place"), vectors(), mode)
    train(model, optimizer, loader)


# --- copies ---


def copied_for_a_client(cured: bool, mode: str = "hooks") -> None:
    """A client trains a copy of the private model, as in federated training."""
    net = mlp()
    model, optimizer, loader, _ = private(copy.deepcopy(net) if cured else net, vectors(), mode)
    if cured:
        model._module.load_state_dict(net.state_dict())
    train(model if cured else copy.deepcopy(model), optimizer, loader)


# --- what Opacus' hooks cannot do ---


def unfrozen_later(cured: bool, mode: str = "hooks") -> None:
    """The body is frozen when make_private is called, and trained from the third step on."""
    net = mlp()
    net[0].requires_grad_(cured)
    model, optimizer, loader, _ = private(net, vectors(), trained=list(net.parameters()))
    train(model, optimizer, islice(loader, 2))
    net.requires_grad_(True)
    train(model, optimizer, loader)


def gradient_penalty(cured: bool, mode: str = "hooks") -> None:
    model, optimizer, loader, _ = private(mlp(), vectors())
    for x, y in loader:
        x.requires_grad_()
        output = model(x)
        loss = functional.cross_entropy(output, y)
        if not cured:
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            loss = loss + slope.square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class Scaled(nn.Module):
    """Scales its input by a weight, and looks for values that are not finite."""

    def __init__(self, checks: bool) -> None:
        super().__init__()
        self.scale, self.checks = nn.Parameter(torch.ones(())), checks

    def forward(self, x: Tensor) -> Tensor:
        if self.checks and not x.isfinite().all():
            raise ValueError("the input is not finite")
        return x * self.scale


def branch_by_value(cured: bool, mode: str = "hooks") -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled(checks=not cured), nn.Linear(WIDTH, CLASSES))
    model, optimizer, loader, _ = private(net, vectors(), mode)
    train(model, optimizer, loader)


def accumulated_in_ew(cured: bool, mode: str = "ew") -> None:
    model, optimizer, loader, _ = private(mlp(), vectors(), mode)
    for number, (x, y) in enumerate(loader):
        functional.cross_entropy(model(x), y).backward()
        if cured or number % 2:
            optimizer.step()
            optimizer.zero_grad()


PRIVACY, COUNTS = "training_is_not_private", "different_numbers_of_samples"
MISSING, ACCUMULATED, IN_PLACE = (
    "missing_per_sample_gradients",
    "accumulated_per_sample_gradients",
    "outputs_changed_in_place",
)
RETURNED = "the optimizer that make_private returns"

GALLERY = (
    Report(
        TRACKER.replace("issues", "pull") + "729",
        unfrozen_later,
        MISSING,
        ("for 0: frozen when make_private was called",),
        "requires_grad_(True) of 0 before make_private",
        ValueError,
    ),
    Report(
        TRACKER + "31",
        gradient_penalty,
        "captures_used_up",
        ("one forward pass of 2", "gradient penalty"),
        "one backward pass for each forward pass",
        IndexError,
    ),
    Report(
        "https://github.com/pytorch/functorch/issues/1066",
        branch_by_value,
        "forward_not_vectorized",
        ("failures.py:", "no grad sampler for Scaled", "the forward of 1"),
        "torch.where instead of an if",
        RuntimeError,
        flash_clip=True,
    ),
    Report(
        TRACKER.replace("issues", "pull") + "441",
        accumulated_in_ew,
        ACCUMULATED,
        ("0, 2: 2 backward passes", "the mode ew allows no accumulation"),
        "one backward pass for each step",
        RuntimeError,
    ),
    Report(
        TRACKER + "389", own_optimizer_steps, PRIVACY, ("8 of 8 updates", "SGD that make_private was given"), RETURNED
    ),
    Report(TRACKER + "313", new_optimizer_steps, PRIVACY, ("8 of 8 updates", "steps another Adam"), RETURNED),
    Report(
        TRACKER + "389",
        returned_objects_dropped,
        PRIVACY,
        ("1 of 1 update", "SGD that make_private was given"),
        RETURNED,
        ValueError,
    ),
    Report(
        TRACKER + "319",
        batch_norm,
        "make_private_failed",
        ("BatchNorm cannot support",),
        "ModuleValidator.fix(model)",
        UnsupportedModuleError,
    ),
    Report(
        TRACKER + "432",
        optimizer_before_the_fix,
        "make_private_failed",
        ("parameters are different",),
        "make the optimizer",
        ValueError,
    ),
    Report(
        TRACKER + "31",
        generator_before_zero_grad,
        ACCUMULATED,
        ("optimizer.step() had used",),
        "directly after each optimizer.step()",
        ValueError,
    ),
    Report(
        "https://discuss.pytorch.org/t/calling-loss-backward-reduce-memory-usage/2735",
        evaluation_keeps_graphs,
        "activations_of_earlier_steps",
        ("passes of step 8", "evaluation"),
        "torch.no_grad()",
    ),
    Report(
        TRACKER + "645",
        acting_with_captures,
        "captures_without_backward",
        ("wait for a backward pass", "the step failed"),
        "torch.no_grad()",
        ValueError,
    ),
    Report(TRACKER + "602", own_criterion_in_ghost, PRIVACY, ("none of 8 steps",), "returned criterion"),
    Report(TRACKER + "501", trained_beside_the_optimizer, "growing_memory", ("per_sample_gradients",), "freeze 0 "),
    Report(
        TRACKER + "501", trained_beside_with_poisson, ACCUMULATED, ("0, which no optimizer",), "freeze 0 ", ValueError
    ),
    Report(
        TRACKER + "320", no_zero_grad, ACCUMULATED, ("zero_grad was never called",), "optimizer.zero_grad()", ValueError
    ),
    Report(TRACKER + "523", discriminator, ACCUMULATED, ("2 backward passes",), "into one batch", ValueError),
    Report(TRACKER + "459", accumulated_by_hand, ACCUMULATED, ("2 backward passes",), "BatchMemoryManager", ValueError),
    Report(
        TRACKER + "683",
        accumulated_in_ghost,
        "discarded_backward_passes",
        ("4 backward passes", "the last one alone"),
        "BatchMemoryManager",
    ),
    Report(TRACKER + "65", generator_pass, "unused_per_sample_gradients", ("7 times", "generator"), "disable_hooks()"),
    Report(
        TRACKER + "446",
        evaluation_beside_gradients,
        "per_sample_gradients_in_forward",
        ("an evaluation",),
        "directly after optimizer.step()",
    ),
    Report(
        "https://github.com/huggingface/transformers/issues/1742",
        repeated_runs,
        "models_of_earlier_runs",
        ("2 equal models",),
        "gc.collect()",
    ),
    Report(
        TRACKER + "841",
        broadcast_positions,
        COUNTS,
        ("positions has 1, but", f" {BATCH}"),
        "expand",
        RuntimeError,
        True,
    ),
    Report(
        TRACKER + "686",
        flattened_tokens,
        COUNTS,
        (f"encoder has {BATCH * TOKENS}, but head {BATCH}",),
        "keep the batch as the first dimension of the input of encoder",
        RuntimeError,
        True,
    ),
    Report(
        TRACKER + "578", weight_used_elsewhere, MISSING, ("for other: used outside",), "call other", ValueError, True
    ),
    Report(TRACKER + "602", unused_layer, MISSING, ("for other: not reached",), "freeze other", ValueError),
    Report(
        TRACKER + "578", unused_layer_in_ghost, MISSING, ("for other: not reached",), "freeze other", AttributeError
    ),
    Report(TRACKER + "578", layer_in_eval_mode, MISSING, ("for other: in eval mode",), ".train() of other", ValueError),
    Report(TRACKER + "828", in_place_activation, IN_PLACE, ("1 (ReLU)",), "inplace=False in 1", RuntimeError, True),
    Report(TRACKER + "828", in_place_residual, IN_PLACE, ("failures.py:",), "x = x + y", RuntimeError, True),
    Report(
        TRACKER + "608",
        copied_for_a_client,
        "copied_private_model",
        ("failures.py:", "a copy of a private model"),
        "copy the model before make_private",
        AttributeError,
    ),
)
