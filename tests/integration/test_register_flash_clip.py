# SPDX-License-Identifier: Apache-2.0
"""grad_sample_mode="flash_clip" for programs that call Opacus' own functions."""

import copy
import gc
import json
import subprocess
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import opacus
import opacus.grad_sample.utils
import opacus.optimizers
import opacus.privacy_engine
import pytest
import torch
from opacus.grad_sample import GradSampleModule, get_gsm_class, prepare_module, wrap_model
from opacus.optimizers import DPOptimizer, get_optimizer_class
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_memprof import clipping, profile
from opacus_memprof.clipping import FlashClipHooks, GradSampleModuleFlashClip
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.directory import PRIVACY_CHECK
from tests.integration.clipping_by_hand import by_hand
from tests.integration.test_distributed import ENVIRONMENT
from tests.warm_python import interpreter

RANKS = Path(__file__).parent / "scripts" / "register_ranks.py"

ORIGINALS = (get_gsm_class, get_optimizer_class, opacus.grad_sample.utils.get_hooks_class)
BOUND = 0.4


def places() -> tuple[Any, ...]:
    """The functions as they are found in each namespace of Opacus, and in this module."""
    utils = opacus.grad_sample.utils
    return (
        opacus.grad_sample.get_gsm_class,
        utils.get_gsm_class,
        opacus.privacy_engine.get_gsm_class,
        get_gsm_class,
        opacus.optimizers.get_optimizer_class,
        opacus.privacy_engine.get_optimizer_class,
        get_optimizer_class,
        utils.get_hooks_class,
    )


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    before = places()
    clipping.register()
    yield
    clipping.unregister()
    assert all(a is b for a, b in zip(before, places(), strict=True))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def losses(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"]).square().sum(1)  # type: ignore[no-any-return]


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(7, 5, dtype=torch.float64)}


def make_optimizer(parameters: Any, rule: str = "flat", distributed: bool = False, **given: Any) -> Any:
    return get_optimizer_class(rule, distributed, "flash_clip")(
        optimizer=torch.optim.SGD(parameters, lr=0.1),
        **{
            "noise_multiplier": 0.0,
            "max_grad_norm": BOUND,
            "expected_batch_size": 7,
            "loss_reduction": "sum",
            **given,
        },
    )


@pytest.mark.parametrize("function", [wrap_model, prepare_module, "utils"])
def test_a_trainer_clips_to_the_bound_of_its_optimizer(function: Any) -> None:
    function = opacus.grad_sample.utils.wrap_model if function == "utils" else function
    model = mlp()
    _, expected = by_hand(copy.deepcopy(model), batch(), losses, BOUND)
    private = function(model, grad_sample_mode="flash_clip", batch_first=True, loss_reduction="sum")
    assert isinstance(private, GradSampleModuleFlashClip)
    optimizer = make_optimizer(private.parameters())
    assert isinstance(optimizer, DPOptimizer)
    assert optimizer.max_grad_norm == BOUND
    losses(private, batch()).sum().backward()
    optimizer.pre_step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-12)


def test_without_a_wrapper_and_per_layer() -> None:
    model = mlp()
    bounds = [0.1, 0.2, 0.3, 0.4]
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for n in range(7):
        model.zero_grad()
        losses(model, {"x": batch()["x"][n : n + 1]}).sum().backward()
        for (name, parameter), bound in zip(model.named_parameters(), bounds, strict=True):
            assert parameter.grad is not None
            total[name] += min(1.0, bound / (float(parameter.grad.norm()) + 1e-6)) * parameter.grad
    model.zero_grad()
    hooks = prepare_module(model, "flash_clip", wrap_model=False, batch_first=True, loss_reduction="sum")
    assert isinstance(hooks, FlashClipHooks)
    optimizer = make_optimizer(model.parameters(), "per_layer", max_grad_norm=bounds)
    losses(model, batch()).sum().backward()
    optimizer.pre_step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, total[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rule", ["flat", "automatic", "adaptive"])
def test_the_engine_of_opacus(rule: str) -> None:
    model = mlp()
    adaptive = {
        "target_unclipped_quantile": 0.5,
        "clipbound_learning_rate": 0.2,
        "max_clipbound": 10.0,
        "min_clipbound": 0.01,
        "unclipped_num_std": 4.0,
    }
    private, optimizer, loader = opacus.PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(batch()["x"]), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=BOUND,
        clipping=rule,
        grad_sample_mode="flash_clip",
        **(adaptive if rule == "adaptive" else {}),
    )
    assert isinstance(private, GradSampleModuleFlashClip)
    assert private.bookkeeping.rule.clipping == rule
    for (x,) in loader:
        optimizer.zero_grad()
        private(x).square().sum(1).mean().backward()
        optimizer.step()


def test_other_modes_are_as_before_and_registering_again_changes_options() -> None:
    assert get_gsm_class("hooks") is GradSampleModule
    assert get_optimizer_class("flat", False) is DPOptimizer
    with pytest.raises(ValueError, match="Unexpected grad_sample_mode: fast"):
        get_gsm_class("fast")
    found = places()
    clipping.register(passes=2, workspace_mb=3.0)
    assert all(a is b for a, b in zip(found, places(), strict=True))
    private: Any = wrap_model(mlp(), "flash_clip", loss_reduction="sum")
    assert private.passes == 2
    with pytest.raises(MemprofError, match="passes=2 finds one clip factor"):
        make_optimizer(private.parameters(), "per_layer", max_grad_norm=[1.0] * 4)
    assert get_optimizer_class("flat", False, "flash_clip") is get_optimizer_class("flat", False, "flash_clip")


def test_unregistering() -> None:
    clipping.unregister()
    assert (get_gsm_class, get_optimizer_class, opacus.grad_sample.utils.get_hooks_class) == ORIGINALS
    assert not hasattr(get_gsm_class, "__wrapped__")
    with pytest.raises(ValueError, match="Unexpected grad_sample_mode: flash_clip"):
        wrap_model(mlp(), "flash_clip")
    clipping.unregister()
    clipping.register()
    assert isinstance(wrap_model(mlp(), "flash_clip"), GradSampleModuleFlashClip)


def test_modules_that_were_made_otherwise_are_found() -> None:
    private = GradSampleModuleFlashClip(mlp(), loss_reduction="sum", max_grad_norm=9.0)
    assert make_optimizer(private.parameters()).max_grad_norm == BOUND
    assert private.bookkeeping.rule.bound == BOUND


def test_a_model_is_not_kept_alive() -> None:
    private: Any = wrap_model(mlp(), "flash_clip")
    dead = weakref.ref(private)
    del private
    gc.collect()
    assert dead() is None


def test_refusals() -> None:
    private: Any = wrap_model(mlp(), "flash_clip", loss_reduction="sum")
    other: Any = wrap_model(mlp(), "flash_clip", loss_reduction="sum")
    with pytest.raises(MemprofError, match="belong to no flash_clip module: call wrap_model"):
        make_optimizer(mlp().parameters())
    with pytest.raises(MemprofError, match=r"2 of the optimizer's parameters, the first of shape \[4, 4\], do not"):
        make_optimizer([*private.parameters(), *nn.Linear(4, 4).parameters()])
    with pytest.raises(MemprofError, match="belong to 2 flash_clip modules"):
        make_optimizer([*private.parameters(), *other.parameters()])
    with pytest.raises(MemprofError, match=r"0.weight, 0.bias can be trained but the optimizer does not hold them"):
        make_optimizer(private._module[2].parameters())
    with pytest.raises(MemprofError, match="loss_reduction='mean' and its module 'sum'"):
        make_optimizer(private.parameters(), loss_reduction="mean")
    with pytest.raises(MemprofError, match="noise_multiplier is -1"):
        make_optimizer(private.parameters(), noise_multiplier=-1)
    with pytest.raises(MemprofError, match="max_grad_norm is inf"):
        make_optimizer(private.parameters(), max_grad_norm=float("inf"))
    with pytest.raises(MemprofError, match="does not know the argument flash_clip_passes: options of flash_clip are"):
        make_optimizer(private.parameters(), flash_clip_passes=1)
    with pytest.raises(MemprofError, match="clipping is 'soft'; flash_clip knows"):
        get_optimizer_class("soft", False, "flash_clip")
    with pytest.raises(MemprofError, match="'adaptive' trains on one device"):
        get_optimizer_class("adaptive", True, "flash_clip")
    first = make_optimizer(private.parameters())
    losses(private, batch()).sum().backward()
    make_optimizer(private.parameters(), max_grad_norm=3 * BOUND)
    with pytest.raises(MemprofError, match=r"made for this model, .*bound 1.2, but this one has 'flat' and 0.4"):
        first.step()
    private.remove_hooks()
    with pytest.raises(MemprofError, match="belong to no flash_clip module"):
        make_optimizer(private.parameters())
    clipping.register(passes=2)
    early: Any = wrap_model(mlp(), "flash_clip", loss_reduction="sum")
    losses(early, batch()).sum().backward()
    with pytest.raises(MemprofError, match="clipped in two passes before this optimizer was made"):
        make_optimizer(early.parameters())
    with pytest.raises(MemprofError, match="Sequential is in evaluation mode, where its normalization layers"):
        wrap_model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval(), "flash_clip")
    with pytest.raises(MemprofError, match="passes is 3"):
        clipping.register(passes=3)  # type: ignore[arg-type]
    with pytest.raises(MemprofError, match="check is 'daily'"):
        clipping.register(check="daily")  # type: ignore[arg-type]


def test_a_model_in_evaluation_mode_as_from_pretrained_returns_it() -> None:
    model = mlp().eval()
    private: Any = wrap_model(model, "flash_clip", batch_first=True, loss_reduction="sum")
    optimizer = make_optimizer(private.parameters())
    private.train()
    losses(private, batch()).sum().backward()
    optimizer.step()


def test_several_ranks() -> None:
    done = subprocess.run([*interpreter(), str(RANKS)], capture_output=True, text=True, timeout=200, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [line.split() for line in done.stdout.splitlines()]
    assert [(wrap, cls) for wrap, cls, _ in found] == [
        ("ddp", "RegisteredDPOptimizerFlashClipDDP"),
        ("dpddp", "RegisteredDPOptimizerFlashClipDDP"),
        ("fsdp2", "RegisteredDPOptimizerFlashClipFSDP"),
    ]
    assert all(float(difference) < 1e-10 for _, _, difference in found)


def test_a_trainer_of_transformers(tmp_path: Path) -> None:
    """The model is wrapped when it is handed over, and the optimizer is made from the parameters alone.

    Trainers built on Opacus do this.
    """
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    before = copy.deepcopy(model.state_dict())
    seen: list[float] = []

    class Trainer(transformers.Trainer):  # type: ignore[misc,name-defined]
        def create_optimizer(self, *_: Any) -> Any:
            made = get_optimizer_class("flat", False, "flash_clip")
            self.optimizer = made(
                optimizer=torch.optim.SGD(self.model.parameters(), lr=0.5),
                noise_multiplier=0.0,
                max_grad_norm=BOUND,
                expected_batch_size=4,
            )
            self.optimizer.attach_step_hook(
                lambda optimizer: seen.append(float(torch.stack([p.grad.norm() for p in optimizer.params]).norm()))
            )
            return self.optimizer

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
            return nn.functional.cross_entropy(logits.transpose(1, 2), inputs["input_ids"][:, 1:])

    class ZeroGrad(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        """transformers zeroes the gradients of the model, which a DPOptimizer does not hear of."""

        def on_step_end(self, *_: Any, optimizer: Any, **__: Any) -> None:
            optimizer.zero_grad()

    data = [{"input_ids": torch.randint(20, (6,))} for _ in range(8)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, num_train_epochs=1, report_to=[], use_cpu=True, max_grad_norm=0.0,
        save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    hooks: Any = prepare_module(model, "flash_clip", wrap_model=False, batch_first=True, loss_reduction="mean")
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[ZeroGrad()]).train()
    hooks.cleanup()
    assert len(seen) == 2
    assert all(0 < size <= BOUND * 1.001 for size in seen)  # the mean of 4 gradients of at most C
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("has_engine", [True, False])
def test_a_session_writes_what_was_proved(tmp_path: Path, has_engine: bool) -> None:
    """Once for each model, whoever made its optimizer and however often; not for models of an earlier session."""
    for name, steps in (("first", 2), ("second", 1)):
        model = mlp()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        with profile(tmp_path / name, device="cpu"):
            if has_engine:
                data = DataLoader(TensorDataset(torch.randn(8, 5).double()), batch_size=4)
                given = {"noise_multiplier": 1.0, "max_grad_norm": BOUND, "loss_reduction": "sum"}
                module, optimizer, _ = opacus.PrivacyEngine().make_private(
                    module=model, optimizer=plain, data_loader=data, grad_sample_mode="flash_clip", **given
                )
            else:
                module = wrap_model(model, grad_sample_mode="flash_clip", loss_reduction="sum")
                for _ in range(2):
                    optimizer = get_optimizer_class("flat", distributed=False, grad_sample_mode="flash_clip")(
                        plain, noise_multiplier=1.0, max_grad_norm=BOUND, expected_batch_size=4, loss_reduction="sum"
                    )
            for _ in range(steps):
                optimizer.zero_grad()
                module(torch.randn(4, 5).double()).square().sum().backward()
                optimizer.step()
        (found,) = json.loads((tmp_path / name / PRIVACY_CHECK).read_text())["models"]
        assert (found["mode"], found["steps"], found["max_grad_norm"]) == ("flash_clip", steps, [BOUND, BOUND])
        assert found["situations"][0]["forwards"] == steps
