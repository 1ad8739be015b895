# SPDX-License-Identifier: Apache-2.0
"""Private training loops that are wrong or end early, for private_loops.py."""

import copy
import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
from opacus.data_loader import DPDataLoader
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.utils import wrap_model
from opacus.optimizers import DPOptimizer, get_optimizer_class
from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
from opacus.schedulers import StepNoise
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset

from opacus_memprof import PrivacyEngine
from tests.integration.scripts.private_training import BATCH, Net, data, memory_manager, private, train


def own_optimizer(mode: str) -> None:
    """Opacus' issue 389."""
    model, private_optimizer, criterion, loader = private(mode)
    train(model, private_optimizer.original_optimizer, criterion, loader)


def own_optimizer_with_poisson(mode: str) -> None:
    model, private_optimizer, criterion, loader = private(mode, poisson_sampling=True)
    train(model, private_optimizer.original_optimizer, criterion, loader)


def new_optimizer(mode: str) -> None:
    model, _, criterion, loader = private(mode)
    train(model, torch.optim.Adam(model.parameters()), criterion, loader)


def copied(mode: str) -> None:
    """Opacus' issue 820: the optimizer has the parameters of a model that was copied."""
    model, optimizer, criterion, loader = private(mode)
    train(copy.deepcopy(model), optimizer, criterion, loader)


def other_model(mode: str) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    PrivacyEngine().make_private(
        module=copy.deepcopy(model), optimizer=optimizer, data_loader=data(), noise_multiplier=1.0, max_grad_norm=1.0
    )


def foreign(mode: str) -> None:
    """The same without make_private, which does not look at the parameters."""
    model: Any = Net()
    optimizer = get_optimizer_class("flat", False, mode)(
        torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=BATCH
    )
    model = wrap_model(copy.deepcopy(model), mode)
    criterion: Any = nn.CrossEntropyLoss()
    if mode == "ghost":
        criterion = DPLossFastGradientClipping(model, optimizer, criterion)
    train(model, optimizer, criterion, data())


def replaced_head(mode: str) -> None:
    """The optimizer is as old as the former last layer."""
    model = Net()
    optimizer = torch.optim.SGD([*model.conv.parameters(), *model.norm.parameters()], lr=0.1)
    model.head = nn.Linear(8, 4)
    private_optimizer = DPOptimizer(optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=BATCH)
    train(GradSampleModule(model), private_optimizer, nn.CrossEntropyLoss(), data())


def silent_copy(mode: str) -> None:
    """All per-sample gradients are there, but those of the model that is not used."""
    old, new = Net(), Net()
    wrapped, other = GradSampleModule(old), GradSampleModule(new)
    optimizer = DPOptimizer(
        torch.optim.SGD([*new.conv.parameters(), *old.norm.parameters(), *old.head.parameters()], lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=BATCH,
    )
    for x, y in data():
        loss: Any = nn.CrossEntropyLoss()
        other(x).sum().backward()
        loss(wrapped(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def old_accumulation(mode: str) -> None:
    """The defect behind Opacus' issue 692, put back: the sum is the gradient's own memory."""

    def accumulate(self: Any) -> None:
        for p in self.params:
            if p.summed_grad is not None:
                p.summed_grad += p.grad
            else:
                p.summed_grad = p.grad

    DPOptimizerFastGradientClipping.accumulate = accumulate
    memory_manager("ghost")


def scaled(mode: str, max_grad_norm: float = 1000.0) -> None:
    """Opacus' issue 377: with GradScaler, all samples are clipped."""
    model, optimizer, criterion, loader = private(mode, max_grad_norm=max_grad_norm)
    scaler = torch.amp.GradScaler("cpu")
    for x, y in loader:
        scaler.scale(criterion(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def divided_loss(mode: str) -> None:
    model, optimizer, criterion, loader = private(mode)
    train(model, optimizer, lambda out, y: criterion(out, y) / 2, loader, every=2)


def unused(mode: str) -> None:
    model: Any = Net()
    model.spare = nn.Linear(3, 3)
    train(*private(mode, model))


def tokens(mode: str) -> None:
    """A layer gets rows that are no samples."""

    class Tokens(Net):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            rows = self.conv(x).permute(0, 2, 3, 1).reshape(-1, 8)
            result: torch.Tensor = self.head(rows).view(len(x), -1, 4).mean(1)
            return result

    model = Tokens()
    model.norm = nn.Identity()  # type: ignore[assignment]
    train(*private(mode, model))


def poisson_accumulation(mode: str) -> None:
    train(*private(mode, poisson_sampling=True), every=2)


def mixing(mode: str) -> None:
    class Mixing(Net):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x - x.mean(0), scale)

    train(*private(mode, Mixing()))


def no_noise(mode: str) -> None:
    """Noise that misses a parameter, and is too small in the others."""

    def add_noise(self: Any) -> None:
        for p in self.params:
            std = 0.0 if p.shape == (4,) else 0.5 * self.noise_multiplier * self.max_grad_norm
            p.grad = (p.summed_grad + std * torch.randn_like(p.summed_grad)).view_as(p)

    DPOptimizer.add_noise = add_noise
    train(*private(mode))


def with_replacement(mode: str) -> None:
    samples = data().dataset
    sampler = RandomSampler(samples, replacement=True)
    train(*private(mode, data_loader=DataLoader(samples, batch_size=BATCH, sampler=sampler)))


def same_noise(mode: str) -> None:
    model, optimizer, criterion, loader = private(mode, noise_generator=torch.Generator())

    def batches() -> Iterator[Any]:
        for batch in loader:
            optimizer.generator.manual_seed(1)
            yield batch

    train(model, optimizer, criterion, batches())


def wrong_divisor(mode: str) -> None:
    model, optimizer, criterion, loader = private(mode)
    scale = optimizer.scale_grad

    def scale_grad() -> None:
        scale()
        for p in optimizer.params:
            p.grad *= 3

    optimizer.scale_grad = scale_grad
    train(model, optimizer, criterion, loader)


def permuted(mode: str) -> None:
    """Opacus' sampler for an unpadded convolution of a permuted view is wrong, in hooks and ghost."""

    class Permuted(Net):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            x = self.first(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            result: torch.Tensor = self.head(self.conv(x).mean((2, 3)))
            return result

    model = Permuted()
    model.first, model.conv, model.norm = nn.LayerNorm(3), nn.Conv2d(3, 8, 2, stride=2), nn.Identity()  # type: ignore
    train(*private(mode, model))


def other_update(mode: str) -> None:
    """Weight decay of the script's own, inside of the optimizer's step."""
    made = private(mode)

    def decay(optimizer: Any, args: Any, kwargs: Any) -> None:
        optimizer.param_groups[0]["params"][0].data.mul_(0.5)

    made[1].original_optimizer.register_step_post_hook(decay)
    train(*made)


def original_loader(mode: str) -> None:
    """Trains on the loader that was given to make_private."""
    loader = data()
    train(*private(mode, poisson_sampling=True, data_loader=loader)[:3], loader)


def original_loader_augmented(mode: str) -> None:
    loader = data()
    made = private(mode, poisson_sampling=True, data_loader=loader)
    train(*made[:3], ((x + torch.randn_like(x), y) for x, y in loader))


def fixed_batch(mode: str) -> None:
    made = private(mode, poisson_sampling=True)
    train(*made[:3], [next(iter(made[3]))] * 3)


def fixed_in_loop(mode: str) -> None:
    """New batches are drawn, and the first one is used."""
    made = private(mode, poisson_sampling=True)
    batches = list(made[3])[:3]
    train(*made[:3], (batches[0] for _ in batches))


def fixed_augmented(mode: str) -> None:
    made = private(mode, poisson_sampling=True)
    x, y = next(iter(made[3]))
    train(*made[:3], ((x + torch.randn_like(x), y) for _ in range(3)))


def without_loader(mode: str) -> None:
    made = private(mode, poisson_sampling=True)
    x, y = made[3].dataset.tensors
    train(*made[:3], ((x[i::8], y[i::8]) for i in range(8)))


def zipped(mode: str) -> None:
    """Both loaders are drawn from."""
    loader = data()
    made = private(mode, poisson_sampling=True, data_loader=loader)
    train(*made[:3], (batch for batch, _ in zip(loader, made[3], strict=False)))


def uncounted(mode: str) -> None:
    made = private(mode, poisson_sampling=True)
    made[1].attach_step_hook(None)
    train(*made)


def less_noise(mode: str) -> None:
    """The accountant counts the multiplier from before."""
    engine, made = PrivacyEngine(), private(mode, poisson_sampling=True)
    made[1].attach_step_hook(lambda _: engine.accountant.step(noise_multiplier=1.0, sample_rate=0.125))
    made[1].noise_multiplier = 0.1
    train(*made)


def other_rate(mode: str) -> None:
    """The accountant's rate is that of a larger data set."""
    made = private(mode, poisson_sampling=True)
    part = Subset(made[3].dataset, range(16))
    train(*made[:3], DPDataLoader(part, sample_rate=0.5))


def other_loader(mode: str) -> None:
    """Evaluation data, without Poisson sampling."""
    train(*private(mode)[:3], data())


def zipped_and_changed(mode: str) -> None:
    loader = data()
    made = private(mode, poisson_sampling=True, data_loader=loader)
    train(*made[:3], ((x + 1, y) for (x, y), _ in zip(loader, made[3], strict=False)))


def scaled_all(mode: str) -> None:
    """All samples are clipped with and without GradScaler."""
    scaled(mode, max_grad_norm=1e-9)


# --- ends early ---
def interrupted(mode: str) -> None:
    train(*private(mode), after=lambda i: os.kill(os.getpid(), signal.SIGINT))


def raises(mode: str) -> None:
    def after(i: int) -> None:
        raise ValueError("the data are gone")

    train(*private(mode), after=after)


def no_step(mode: str) -> None:
    model, _, criterion, loader = private(mode)
    for x, y in loader:
        criterion(model(x), y).backward()
        break


def one_step(mode: str) -> None:
    train(*private(mode, data_loader=data(64)))


def no_multiplier(mode: str) -> None:
    train(*private(mode, noise_multiplier=0.0))


def late_scheduler(mode: str) -> None:
    made = private(mode)
    noise = StepNoise(made[1], step_size=1, gamma=0.5)
    train(*made)
    noise.step()


def flattened(mode: str) -> None:
    """An output whose rows are not those of samples."""

    class Flattened(Net):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x, scale).flatten()[2:]

    model, optimizer, _, loader = private(mode, Flattened())
    train(model, optimizer, lambda out, y: out.mean(), loader)


def compiled(mode: str) -> None:
    train(*private(mode, torch.compile(Net())))


def interrupted_accumulation(mode: str) -> None:
    train(*private(mode), every=2, after=lambda i: os.kill(os.getpid(), signal.SIGINT))


def not_private(mode: str) -> None:
    raise ValueError("the data are gone")


def inner_loss(mode: str, dropout: float = 0.0) -> None:
    """The model computes its loss."""

    class Loss(Net):
        def forward(self, x: torch.Tensor, y: Any = None) -> torch.Tensor:
            loss: torch.Tensor = nn.functional.cross_entropy(super().forward(x), y)
            return loss

    model, optimizer, _, loader = private(mode, Loss(dropout))
    for x, y in loader:
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def random_loss(mode: str) -> None:
    inner_loss(mode, 0.5)


def valid_labels(mode: str) -> None:
    """A mean over all valid labels inside the model. Each sample is clipped, so that only the loss shows it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.head(x).transpose(1, 2), labels, ignore_index=-100)

    labels = torch.randint(0, 4, (64, 5))
    labels[::2, 2:] = -100
    loader = DataLoader(TensorDataset(torch.randn(64, 5, 8), labels), batch_size=BATCH)
    model, optimizer, _, loader = private(mode, Model(), data_loader=loader, max_grad_norm=1e-3)
    for x, y in loader:
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def noiseless(mode: str) -> None:
    """The gradients that are used are not those with noise."""
    model, optimizer, criterion, loader = private(mode)
    for x, y in loader:
        criterion(model(x), y).backward()
        raw = {p: p.grad.clone() for p in optimizer.params}
        optimizer.pre_step()
        for name, p in model._module.named_parameters():
            if name == "norm.bias":
                p.grad = p.summed_grad / BATCH
            elif name == "conv.weight":
                p.grad = raw[p]
        optimizer.original_optimizer.step()
        optimizer.zero_grad()


def updated_by_hand(mode: str) -> None:
    model, _, criterion, loader = private(mode)
    for x, y in loader:
        model.zero_grad()
        criterion(model(x), y).backward()
        for p in model.parameters():
            p.data -= 0.1 * p.grad


def two_reductions(mode: str) -> None:
    model: Any = GradSampleModule(Net(), loss_reduction="mean")
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=BATCH,
        loss_reduction="sum",
    )
    train(model, optimizer, nn.CrossEntropyLoss(), data())


def lbfgs(mode: str) -> None:
    model = Net()
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.LBFGS(model.parameters()),
        data_loader=data(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    train(made[0], made[1], nn.CrossEntropyLoss(), made[2])
