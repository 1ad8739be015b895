# SPDX-License-Identifier: Apache-2.0
"""Private training loops, right and wrong, for `opacus-memprof doctor --script`: private_loops.py CASE [MODE]."""

import copy
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.utils import wrap_model
from opacus.optimizers import DPOptimizer, get_optimizer_class
from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
from opacus.schedulers import StepGradClip, StepNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_memprof import PrivacyEngine

warnings.simplefilter("ignore")
torch.manual_seed(0)
BATCH = 8


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Linear(8, 4)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        result: torch.Tensor = self.head(self.dropout(hidden)) * scale
        return result


def data(batch: int = BATCH) -> DataLoader[Any]:
    x = torch.randn(64, 3, 6, 6) * torch.logspace(-1, 1, 64).view(-1, 1, 1, 1)
    return DataLoader(TensorDataset(x, torch.randint(0, 4, (64,))), batch_size=batch)


def private(mode: str = "hooks", model: nn.Module | None = None, **options: Any) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, criterion and loader from make_private."""
    model = model or Net()
    options = {"noise_multiplier": 1.0, "max_grad_norm": 2.0, "poisson_sampling": False} | options
    criterion: Any = nn.CrossEntropyLoss()
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        data_loader=options.pop("data_loader", None) or data(),
        grad_sample_mode=mode,
        **({"criterion": criterion} if mode == "ghost" else {}),
        **options,
    )
    return made[0], made[1], made[2] if mode == "ghost" else criterion, made[-1]


def train(model: Any, optimizer: Any, criterion: Any, loader: Any, every: int = 1, after: Any = None) -> None:
    for i, (x, y) in enumerate(loader):
        criterion(model(x), y).backward()
        if (i + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
            if after is not None:
                after(i)
    print("trained to the end")


def plain(mode: str) -> None:
    train(*private(mode))


def keyword(mode: str) -> None:
    model, *rest = private(mode)
    train(lambda x: model(x, scale=2.0), *rest)


def dropout(mode: str) -> None:
    train(*private(mode, Net(0.5)))


def poisson(mode: str) -> None:
    train(*private(mode, poisson_sampling=True))


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


def memory_manager(mode: str) -> None:
    model, optimizer, criterion, loader = private(mode, poisson_sampling=True)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as parts:
        train(model, optimizer, criterion, parts)


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


# --- wrong ---
def own_optimizer(mode: str) -> None:
    """Opacus' issue 389."""
    model, private_optimizer, criterion, loader = private(mode)
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


def scaled(mode: str) -> None:
    """Opacus' issue 377: with GradScaler, all samples are clipped."""
    model, optimizer, criterion, loader = private(mode, max_grad_norm=1000.0)
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


CASES: dict[str, Callable[[str], None]] = {name: each for name, each in list(globals().items()) if callable(each)}
CASES[sys.argv[1]](sys.argv[2] if len(sys.argv) > 2 else "hooks")
