# SPDX-License-Identifier: Apache-2.0
"""Private training loops, right and wrong, for `opacus-memprof doctor --script`: private_loops.py CASE [MODE]."""

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from opacus.grad_sample.utils import wrap_model
from opacus.optimizers import get_optimizer_class
from opacus.schedulers import StepGradClip, StepNoise
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_memprof import PrivacyEngine
from tests.integration.scripts import private_loops_wrong
from tests.integration.scripts.private_training import BATCH, Net, data, private, train


def plain(mode: str) -> None:
    train(*private(mode))


def keyword(mode: str) -> None:
    model, *rest = private(mode)
    train(lambda x: model(x, scale=2.0), *rest)


def dropout(mode: str) -> None:
    train(*private(mode, Net(0.5)))


def poisson(mode: str) -> None:
    train(*private(mode, poisson_sampling=True))


def augmented(mode: str) -> None:
    """Inputs that no longer are the loader's, and an evaluation loader before."""
    made = private(mode, poisson_sampling=True)
    next(iter(data()))
    train(*made[:3], ((x.flip(3) + torch.randn_like(x), y) for x, y in made[3]))


def transformed(mode: str) -> None:
    """Batches of another form, and a transform that keeps the values."""
    made = private(mode, poisson_sampling=True)
    train(*made[:3], ((x.double()[:, [2, 1, 0]].float(), y) for x, y in made[3]))


def workers(mode: str) -> None:
    """Worker processes draw ahead of the steps."""
    loader = DataLoader(data().dataset, batch_size=BATCH, num_workers=2)
    train(*private(mode, poisson_sampling=True, data_loader=loader))


def micro_batches(mode: str) -> None:
    """Each batch of the loader is split, and two backwards make one step."""
    made = private(mode)
    train(*made[:3], (part for x, y in made[3] for part in zip(x.split(4), y.split(4), strict=True)), every=2)


def accelerated(mode: str) -> None:
    """Accelerate's loader, which draws one batch ahead."""
    from accelerate.data_loader import prepare_data_loader

    *made, loader = private(mode, poisson_sampling=True)
    train(*made, prepare_data_loader(loader, num_processes=1, process_index=0))


def less_noise_later(mode: str) -> None:
    """The accountant counts the multiplier of each step."""
    made = private(mode, poisson_sampling=True)
    train(*made, after=lambda i: setattr(made[1], "noise_multiplier", 0.5))


def empty(mode: str) -> None:
    """Logical batches of one sample on average: some are empty."""
    train(*private(mode, poisson_sampling=True, data_loader=data(1)))


def autocast(mode: str) -> None:
    model, *rest = private(mode)

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float()

    train(run, *rest)


def gpt2(mode: str) -> None:
    """Tied embeddings, dropout, and outputs in a class of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=20, n_positions=8, attn_implementation="eager")
    tokens = TensorDataset(torch.randint(0, 20, (16, 8)))
    model, optimizer, criterion, loader = private(
        mode, GPT2LMHeadModel(config).train(), data_loader=DataLoader(tokens, batch_size=4)
    )
    for (ids,) in loader:
        logits = model(input_ids=ids, use_cache=False).logits
        criterion(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulation(mode: str) -> None:
    train(*private(mode), every=2)


def schedulers(mode: str) -> None:
    made = private(mode)
    noise, clip = (
        StepNoise(made[1], step_size=1, gamma=0.5),
        StepGradClip(made[1], step_size=1, gamma=0.5),
    )
    train(*made, after=lambda i: (noise.step(), clip.step()))


def per_layer(mode: str) -> None:
    train(*private(mode, clipping="per_layer", max_grad_norm=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]))


def per_layer_scheduler(mode: str) -> None:
    made = private(mode, clipping="per_layer", max_grad_norm=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    clip = StepGradClip(made[1], step_size=1, gamma=0.5)
    train(*made, after=lambda i: clip.step())


def adaptive(mode: str) -> None:
    options = {"max_clipbound": 10.0, "min_clipbound": 0.01, "clipbound_learning_rate": 0.2}
    train(
        *private(mode, clipping="adaptive", target_unclipped_quantile=0.5, unclipped_num_std=1.0, **options),
    )


def learning_rate(mode: str) -> None:
    made = private(mode)
    rate = torch.optim.lr_scheduler.StepLR(made[1], 1, 0.5)
    train(*made, after=lambda i: rate.step())


def changed_outside(mode: str) -> None:
    made = private(mode)
    bias = dict(made[0].named_parameters())["_module.head.bias"]
    train(*made, after=lambda i: bias.data.add_(0.1))


def multiplicity(mode: str) -> None:
    """Two augmented copies of each sample are clipped as one (De et al. 2022, arXiv 2204.13650)."""
    model, optimizer, criterion, loader = private(mode)
    for x, y in loader:
        criterion(model(x.repeat_interleave(2, 0)), y.repeat_interleave(2)).backward()
        for p in optimizer.params:
            p.grad_sample = p.grad_sample.unflatten(0, (len(x), 2)).mean(1)
        optimizer.step()
        optimizer.zero_grad()


def gradients_halved(mode: str) -> None:
    """After noise, which is no defect of privacy."""
    model, optimizer, criterion, loader = private(mode)
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.pre_step()
        model._module.conv.weight.grad[:2] *= 0.5
        optimizer.original_optimizer.step()
        optimizer.zero_grad()


def generated(mode: str) -> None:
    """A step on a batch, and one on what another model has made, as for a discriminator."""
    model, optimizer, criterion, loader = private(mode, poisson_sampling=True)
    train(model, optimizer, criterion, (part for x, y in loader for part in ((x, y), (torch.randn_like(x), y))))


def clipped_after_noise(mode: str) -> None:
    """The noised mean is shortened, which is no wrong divisor."""
    model, optimizer, criterion, loader = private(mode)
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.pre_step()
        nn.utils.clip_grad_norm_(optimizer.params, 1e-3)
        optimizer.original_optimizer.step()
        optimizer.zero_grad()


def plateau(mode: str) -> None:
    """The learning rate follows the loss of the training samples."""
    model, optimizer, criterion, loader = private(mode)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer.original_optimizer)
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(float(loss))


class Centered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(4))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, scale) - self.center


def moving_center(mode: str) -> None:
    """A buffer becomes the mean of what the loop has computed from samples."""
    model, optimizer, criterion, loader = private(mode, Centered())
    for x, y in loader:
        outputs = model(x)
        criterion(outputs, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        model._module.center = outputs.detach().mean(0)


def by_hand(mode: str) -> None:
    """Without make_private."""
    model: Any = wrap_model(Net(), mode, **({"max_grad_norm": 1.0} if mode == "ghost" else {}))
    optimizer = get_optimizer_class("flat", False, mode)(
        torch.optim.Adam(model.parameters()), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=BATCH
    )
    criterion: Any = nn.CrossEntropyLoss()
    if mode == "ghost":
        criterion = DPLossFastGradientClipping(model, optimizer, criterion)
    train(model, optimizer, criterion, data())


def ddp(mode: str) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    train(*private(mode, torch.nn.parallel.DistributedDataParallel(Net())))


def replaced_before(mode: str) -> None:
    model = Net()
    model.head = nn.Linear(8, 4)
    train(*private(mode, model))


def again(mode: str) -> None:
    """A second make_private, as for a phase of its own."""
    made = private(mode)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=made[0], optimizer=made[1], data_loader=data(), noise_multiplier=1.0, max_grad_norm=2.0
    )
    train(model, optimizer, made[2], loader)


@dataclass
class Result:
    logits: torch.Tensor


class InObjects(Net):
    def forward(self, given: Result, scale: float = 1.0) -> Any:
        return Result(super().forward(given.logits))


def objects(mode: str) -> None:
    model, *rest = private(mode, InObjects())
    train(lambda x: model(Result(x)).logits, *rest)


class Kept(Net):
    """Keeps a term of the loss in an attribute."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        hidden = self.norm(self.conv(x))
        self.term = hidden.square().mean((1, 2, 3))
        result: torch.Tensor = self.head(hidden.mean((2, 3)))
        return result


def kept_term(mode: str) -> None:
    model, optimizer, criterion, loader = private(mode, Kept())
    train(model, optimizer, lambda out, y: criterion(out, y) + model._module.term.mean(), loader)


def outer_head(mode: str) -> None:
    """A layer behind the private model, with an optimizer of its own."""
    model, optimizer, criterion, loader = private(mode)
    head = nn.Linear(4, 4)
    own = torch.optim.SGD(head.parameters(), lr=0.1)
    for x, y in loader:
        criterion(head(model(x)), y).backward()
        optimizer.step()
        own.step()
        optimizer.zero_grad()


def same_samples(mode: str) -> None:
    model, optimizer, criterion, loader = private(mode)
    for x, y in loader:
        criterion(model(x), y).backward()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def plain_criterion(mode: str) -> None:
    model, optimizer, _, loader = private(mode)
    train(model, optimizer, nn.CrossEntropyLoss(), loader)


def penalty(mode: str) -> None:
    model, optimizer, criterion, loader = private(mode)
    weight = model._module.conv.weight
    train(model, optimizer, lambda out, y: criterion(out, y) + weight.square().sum(), loader)


def sum_loss(mode: str) -> None:
    model, optimizer, _, loader = private(mode)
    train(model, optimizer, nn.CrossEntropyLoss(reduction="sum"), loader)


def without_zero_grad(mode: str) -> None:
    model, optimizer, criterion, loader = private(mode, poisson_sampling=True)
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.step()


def zero_grad_of_model(mode: str) -> None:
    model, optimizer, criterion, loader = private(mode, poisson_sampling=True)
    for x, y in loader:
        model.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


def old_head(mode: str) -> None:
    model, optimizer, criterion, loader = private(mode)
    model._module.head = nn.Linear(8, 4)
    train(model, optimizer, criterion, loader)


def new_head(mode: str) -> None:
    """The optimizer gets the new parameters, but Opacus has no hooks on them."""
    model, optimizer, criterion, loader = private(mode)
    model._module.head = nn.Linear(8, 4)
    optimizer.param_groups[0]["params"][-2:] = list(model._module.head.parameters())
    train(model, optimizer, criterion, loader)


def evaluating(mode: str) -> None:
    model, *rest = private(mode)
    train(model.eval(), *rest)


def part_of_model(mode: str) -> None:
    """The optimizer holds the first layer alone, whose parameters are also the model's first."""
    model = Net()
    model, optimizer, loader = PrivacyEngine().make_private(  # type: ignore[assignment]
        module=model,
        optimizer=torch.optim.SGD(model.conv.parameters(), lr=0.1),
        data_loader=data(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    train(model, optimizer, nn.CrossEntropyLoss(), loader)


FUNCTIONS = {**vars(private_loops_wrong), **globals()}
FUNCTIONS[sys.argv[1]](sys.argv[2] if len(sys.argv) > 2 else "hooks")
