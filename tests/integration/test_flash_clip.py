# SPDX-License-Identifier: Apache-2.0
"""flash_clip trains as hooks mode does, in float64 to rounding."""

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.integration.flash_clip_models import (
    MODELS,
    Engine,
    Transformer,
    assert_same,
    criterion,
    make_private,
    mlp,
    parameters,
    token_data,
    train,
    train_both,
    vector_data,
)


@pytest.mark.parametrize(("passes", "reduction"), [(1, "mean"), (2, "sum"), ("auto", "mean")])
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_hooks(name: str, passes: Any, reduction: str) -> None:
    run = partial(train, reduction=reduction)
    assert_same(*train_both(name, run, loss_reduction=reduction, flash_clip_passes=passes))


@pytest.mark.parametrize("megabytes", [0.02, 1e5])
def test_the_workspace_does_not_matter(megabytes: float) -> None:
    assert_same(*train_both("transformer", flash_clip_workspace_mb=megabytes))
    assert_same(*train_both("convnet", flash_clip_workspace_mb=megabytes))


@pytest.mark.parametrize("wrap_model", [True, False])
def test_unwrapped_models_train_too(wrap_model: bool) -> None:
    def run(private: tuple[Any, Any, Any]) -> None:
        hooks, optimizer, loader = private
        train((hooks._module, optimizer, loader))

    torch.manual_seed(0)
    model, data = mlp().double(), vector_data(12)
    expected = make_private(copy.deepcopy(model), data, "hooks")
    train(expected)
    private = make_private(copy.deepcopy(model), data, "flash_clip", wrap_model=wrap_model)
    run(private)
    assert_same(parameters(private[0]._module), parameters(expected[0]))


def test_noise_is_opacus_noise() -> None:
    """Without any gradient, what remains is noise: the very numbers that Opacus draws from the same generator."""
    results = []
    for mode in ("hooks", "flash_clip"):
        torch.manual_seed(0)
        module, optimizer, _ = make_private(mlp().double(), vector_data(8), mode, noise_multiplier=2.0)
        (module(torch.randn(4, 9, dtype=torch.float64)) * 0).sum().backward()
        optimizer.step()
        results.append({n: p.grad.clone() for n, p in module.named_parameters()})
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])
    flat = torch.cat([g.flatten() for g in results[1].values()])
    assert float(flat.std()) == pytest.approx(2.0 * 0.3 / 4, rel=0.15)


@pytest.mark.parametrize("passes", [1, 2])
def test_poisson_batches_with_empty_ones(passes: int) -> None:
    sizes: list[int] = []

    def run(private: tuple[Any, Any, Any]) -> None:
        module, optimizer, loader = private
        torch.manual_seed(3)
        for _ in range(4):
            for x, y in loader:
                sizes.append(len(x))
                optimizer.zero_grad()
                criterion("mean")(module(x), y).backward()
                optimizer.step()

    assert_same(*train_both("mlp", run, batch=1, poisson_sampling=True, flash_clip_passes=passes))
    assert 0 in sizes
    assert max(sizes) > 1


@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize("passes", [1, 2])
def test_batch_memory_manager(passes: int, poisson: bool) -> None:
    physical: list[int] = []

    def run(private: tuple[Any, Any, Any]) -> None:
        module, optimizer, loader = private
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer) as split:
            for _ in range(2):
                for x, y in split:
                    physical.append(len(x))
                    criterion("mean")(module(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()

    assert_same(*train_both("mlp", run, batch=5, poisson_sampling=poisson, flash_clip_passes=passes))
    assert max(physical) == 2


def test_accumulated_backwards() -> None:
    def run(private: tuple[Any, Any, Any]) -> None:
        module, optimizer, loader = private
        for i, (x, y) in enumerate(loader):
            criterion("mean")(module(x), y).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()

    assert_same(*train_both("transformer", run, batch=3))


def test_the_bound_can_be_changed_between_steps() -> None:
    def run(private: tuple[Any, Any, Any]) -> None:
        for bound in (0.3, 0.01, 5.0):
            private[1].max_grad_norm = bound
            train(private, steps=1)

    assert_same(*train_both("transformer", run, flash_clip_passes=1))
    assert_same(*train_both("transformer", run, flash_clip_passes=2))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.model, self.reentrant = Transformer(), reentrant

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.model.tokens(ids)
        for block in self.model.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        logits: torch.Tensor = self.model.head(self.model.norm(x)).transpose(1, 2)
        return logits


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool, passes: int) -> None:
    torch.manual_seed(0)
    model, data = Checkpointed(reentrant).double(), token_data(12)
    expected = make_private(copy.deepcopy(model.model), data, "hooks")
    train(expected)
    private = make_private(model, data, "flash_clip", flash_clip_passes=passes)
    train(private)
    assert_same(parameters(private[0]._module.model), parameters(expected[0]))


def test_inplace_activations_may_follow_a_layer() -> None:
    torch.manual_seed(0)
    plain, inplace = (
        nn.Sequential(nn.Linear(9, 20), nn.ReLU(f), nn.Linear(20, 4), nn.ReLU(f)).double() for f in (0, 1)
    )
    inplace.load_state_dict(plain.state_dict())
    data = vector_data(12)
    privates = [make_private(plain, data, "hooks"), make_private(inplace, data, "flash_clip")]
    for private in privates:
        train(private)
    assert_same(parameters(privates[1][0]), parameters(privates[0][0]))


@pytest.mark.parametrize("passes", [1, 2])
def test_lora_adapters(passes: int) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    adapters = peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, lora_alpha=8)
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), adapters).double().train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, which would leave lora_A without gradients
            nn.init.normal_(parameter, std=0.1)
    ids = torch.randint(0, 31, (4, 9))
    results = []
    for mode in ("hooks", "flash_clip"):
        copied = copy.deepcopy(model)
        options = {"flash_clip_passes": passes} if mode == "flash_clip" else {}
        module, optimizer, _ = make_private(copied, token_data(8), mode, **options)
        for _ in range(2):
            optimizer.zero_grad()
            logits = module(input_ids=ids).logits
            criterion("mean")(logits.transpose(1, 2), ids).backward()
            optimizer.step()
        results.append(parameters(module))
    assert_same(results[1], results[0])
    assert any(not torch.equal(results[1][n], p) for n, p in model.named_parameters() if "lora_A" in n)
    assert all(torch.equal(results[1][n], p) for n, p in model.named_parameters() if not p.requires_grad)


def test_with_epsilon() -> None:
    torch.manual_seed(0)
    model = mlp().double()
    engine = Engine()
    private = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(vector_data(32), batch_size=4),
        target_epsilon=8.0,
        target_delta=1e-3,
        epochs=2,
        max_grad_norm=1.0,
        grad_sample_mode="flash_clip",
        flash_clip_passes=2,
        flash_clip_workspace_mb=1,
    )
    assert private[0].passes == 2
    assert private[0].bookkeeping.workspace.bytes == 1 << 20
    for _ in range(2):
        train(private, steps=100)
    assert 0 < engine.get_epsilon(1e-3) <= 8.0


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_an_empty_batch_leaves_only_noise(name: str, passes: int) -> None:
    torch.manual_seed(0)
    build, data = MODELS[name]
    x, y = data(8).tensors
    model = build().double()
    module, optimizer, _ = make_private(model, data(8), "flash_clip", noise_multiplier=0.0, flash_clip_passes=passes)
    criterion("mean")(module(x[:0]), y[:0]).backward()
    optimizer.step()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in module.parameters())


def test_more_samples_than_the_loader_draws_are_warned_of_once() -> None:
    module, optimizer, _ = make_private(nn.Linear(9, 4).double(), vector_data(8), "flash_clip")
    # Four are drawn on average: 34 or fewer may be by chance, or 46 of two batches that are accumulated.
    for parts, is_one_batch, expected in (([24], True, 0), ([20, 20], False, 0), ([20, 20], True, 1), ([60], True, 0)):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for part, samples in enumerate(parts):
                module(torch.randn(samples, 9, dtype=torch.float64)).square().mean().backward()
                if is_one_batch:
                    optimizer.signal_skip_step(part < len(parts) - 1)
                    optimizer.step()
                    optimizer.zero_grad()
            if not is_one_batch:
                optimizer.step()
                optimizer.zero_grad()
        assert [f"clipped {sum(parts)} samples" in str(each.message) for each in found] == [True] * expected
