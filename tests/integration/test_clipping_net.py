# SPDX-License-Identifier: Apache-2.0
"""The net under every step: the clipped sum is no larger than its samples may add up to, whatever has gone wrong."""

import math
from contextlib import nullcontext
from itertools import islice
from typing import Any

import pytest
import torch
from opacus import schedulers
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn

from opacus_memprof.clipping import DPOptimizerFlashClip, GradSampleModuleFlashClip
from opacus_memprof.clipping.arguments import ClipRule
from opacus_memprof.clipping.sampling import DrawnBatches
from opacus_memprof.errors import MemprofError
from tests.integration.flash_clip_models import make_private, vector_data

BOUND = 0.3
CLIPPINGS = ["flat", "per_layer", "adaptive", "automatic"]
ADAPTIVE = {
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.01,
    "unclipped_num_std": 1.0,
}


def private(clipping: str = "flat", dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, Any]:
    """A linear layer; per-layer bounds have BOUND as their root of squares."""
    torch.manual_seed(0)
    options = {
        "clipping": clipping,
        "max_grad_norm": [0.6 * BOUND, 0.8 * BOUND] if clipping == "per_layer" else BOUND,
        "noise_multiplier": 0.0,
        "loss_reduction": "sum",
        **(ADAPTIVE if clipping == "adaptive" else {}),
        **options,
    }
    module, optimizer, _ = make_private(nn.Linear(9, 4).to(dtype), vector_data(8), "flash_clip", **options)
    return module, optimizer


def backward(module: Any, samples: int) -> None:
    """Of samples that are alike: their clipped gradients add up to the largest norm that there can be."""
    dtype = next(module.parameters()).dtype
    x = torch.linspace(1, 5, 9).to(dtype).expand(samples, 9)
    module(x).sum().backward()


def double_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants an error: factors twice as large."""
    for name in ("factors", "factors_of"):
        own = getattr(ClipRule, name)
        monkeypatch.setattr(ClipRule, name, lambda *given, own=own: own(*given).mul_(2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_samples_that_are_alike_are_not_refused(clipping: str, passes: int, dtype: torch.dtype) -> None:
    if clipping == "per_layer" and passes == 2:
        return
    module, optimizer = private(clipping, dtype, flash_clip_passes=passes)
    for samples in (1, 2, 37):
        backward(module, samples)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_factors_that_are_too_large(clipping: str, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if clipping == "per_layer" and passes == 2:
        return
    module, optimizer = private(clipping, flash_clip_passes=passes)
    before = [p.clone() for p in module.parameters()]
    with monkeypatch.context() as planted:
        double_factors(planted)
        backward(module, 5)
        with pytest.raises(MemprofError) as refusal:
            optimizer.step()
    text = str(refusal.value)
    assert "a sample was not clipped" in text
    assert "5 samples" in text
    assert "'weight'" in text
    assert "no parameter was changed" in text
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))
    backward(module, 5)  # training goes on
    optimizer.step()
    assert not torch.equal(next(module.parameters()), before[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_that_are_too_large_for_sums_that_are_rounded(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, optimizer = private(dtype=dtype)
    double_factors(monkeypatch)
    backward(module, 5)
    with pytest.raises(MemprofError, match="a sample was not clipped"):
        optimizer.step()


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_a_sum_that_is_larger_by_two_per_thousand(clipping: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for excess, is_refused in ((1.0005, False), (1.002, True)):
        module, optimizer = private(clipping, max_grad_norm=[1.8, 1.6] if clipping == "per_layer" else 3.0)
        with monkeypatch.context() as planted:
            for name in ("factors", "factors_of"):
                own = getattr(ClipRule, name)
                planted.setattr(ClipRule, name, lambda *given, own=own, excess=excess: own(*given).mul_(excess))
            backward(module, 5)
            if is_refused:
                with pytest.raises(MemprofError, match="a sample was not clipped"):
                    optimizer.step()
            else:
                optimizer.step()


def test_a_sum_that_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    module, optimizer = private()
    monkeypatch.setattr(ClipRule, "factors", lambda rule, norms: norms * float("nan"))
    backward(module, 5)
    with pytest.raises(MemprofError, match="the sum of the clipped gradients of 'weight' is not finite"):
        optimizer.step()


@pytest.mark.parametrize("parts", [[5], [2, 3], [4, 0, 1], [1, 1, 1, 1, 1]])
@pytest.mark.parametrize("skips", [False, True])
def test_samples_are_counted_over_all_parts(parts: list[int], skips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of physical batches of one step, and of backward passes before one: neither too few nor too many."""
    for planted in (False, True):
        module, optimizer = private("per_layer" if len(parts) == 3 else "flat")
        with monkeypatch.context() as patch:
            for i, samples in enumerate(parts):
                is_last = i == len(parts) - 1
                if planted and is_last:
                    double_factors(patch)
                if skips:
                    optimizer.signal_skip_step(not is_last)
                backward(module, samples)
                if skips and not is_last:
                    optimizer.step()
                    optimizer.zero_grad()
            if planted:
                with pytest.raises(MemprofError, match="5 samples"):
                    optimizer.step()
            else:
                optimizer.step()


def test_samples_that_zero_grad_drops_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    module, optimizer = private()
    backward(module, 50)
    optimizer.zero_grad()
    for _ in range(3):
        backward(module, 50)
        optimizer.step()
        optimizer.zero_grad()
    double_factors(monkeypatch)
    backward(module, 2)
    with pytest.raises(MemprofError, match=r"norm 1\.2, but 2 samples .* at most 0\.6"):
        optimizer.step()


@pytest.mark.parametrize("clipping", ["flat", "adaptive"])
def test_noise_that_a_program_adds_itself_divides_nothing(clipping: str) -> None:
    """As Opacus' add_noise: only scale_grad divides."""
    module, optimizer = private(clipping, loss_reduction="mean")
    backward(module, 3)
    optimizer.clip_and_accumulate()
    sums = [p.summed_grad.clone() for p in optimizer.params]
    optimizer.add_noise()
    for parameter, total in zip(optimizer.params, sums, strict=True):
        assert torch.equal(parameter.grad, total)
        assert total.any()


def test_the_sizes_of_adaptive_clipping_count_all_parts() -> None:
    module, optimizer = private("adaptive")
    for samples, skips in ((3, True), (2, False)):
        optimizer.signal_skip_step(skips)
        backward(module, samples)
        optimizer.step()
        if skips:
            optimizer.zero_grad()
    assert optimizer.sample_size == 5
    optimizer.zero_grad(set_to_none=False)
    assert optimizer.sample_size == 0
    assert all(torch.equal(parameter.grad, torch.zeros_like(parameter)) for parameter in optimizer.params)


@pytest.mark.parametrize("is_one_batch", [True, False])
@pytest.mark.parametrize(("bound", "unclipped"), [(BOUND, 0), (1e3, 1)])
def test_the_adaptive_bound_moves_once_for_all_parts(bound: float, unclipped: int, is_one_batch: bool) -> None:
    """Of five samples, whose gradients are alike, none or each is smaller than the bound."""
    module, optimizer = private("adaptive", unclipped_num_std=1e-9, max_grad_norm=bound, max_clipbound=1e6)
    for samples, is_first in ((3, True), (2, False)):
        assert optimizer.max_grad_norm == bound
        backward(module, samples)
        if is_one_batch or not is_first:
            optimizer.signal_skip_step(is_first)
            optimizer.step()
        if is_one_batch and is_first:
            optimizer.zero_grad()
    assert optimizer.max_grad_norm == pytest.approx(bound * math.exp(0.2 * (0.5 - unclipped)), rel=1e-6)


@pytest.mark.parametrize(("bound", "end"), [(BOUND, 1e6), (1e3, 0.125)])
def test_the_adaptive_bound_stays_in_its_range(bound: float, end: float) -> None:
    """Where no sample is unclipped, and where all are; the exponential of the change would overflow."""
    options = {"clipbound_learning_rate": 1e4, "min_clipbound": 0.125, "max_clipbound": 1e6, "max_grad_norm": bound}
    module, optimizer = private("adaptive", unclipped_num_std=1e-9, **options)
    backward(module, 3)
    optimizer.step()
    assert optimizer.max_grad_norm == end


def test_a_batch_without_samples_leaves_the_adaptive_bound() -> None:
    module, optimizer = private("adaptive", noise_multiplier=1.0)
    backward(module, 0)
    optimizer.step()
    assert optimizer.max_grad_norm == BOUND


# --- bounds and noise move together ---
def test_bounds_of_parameters_keep_their_ratios() -> None:
    """A new bound scales the bounds of all parameters, so that noise and sensitivity stay in proportion."""
    module, optimizer = private("per_layer", noise_multiplier=2.0)
    schedule = schedulers.ExponentialGradClip(optimizer, gamma=0.5)
    for halvings in range(3):
        bound = BOUND * 0.5**halvings
        assert optimizer.max_grad_norm == pytest.approx(bound)
        assert optimizer.noise_std() == pytest.approx(2.0 * bound)
        backward(module, 4)
        optimizer.clip_and_accumulate()
        weight, bias = (float(p.summed_grad.norm()) for p in optimizer.params)
        assert weight == pytest.approx(4 * 0.6 * bound, rel=1e-5)
        assert bias == pytest.approx(4 * 0.8 * bound, rel=1e-5)
        optimizer.zero_grad()
        schedule.step()


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_noise_and_bound_follow_schedulers(clipping: str) -> None:
    """The difference to a step without noise is torch's numbers times both."""
    steps: dict[bool, list[torch.Tensor]] = {}
    for noisy in (False, True):
        module, optimizer = private(clipping, noise_multiplier=0.5, noise_generator=torch.Generator().manual_seed(3))
        clip = schedulers.ExponentialGradClip(optimizer, gamma=0.5)
        noise = schedulers.ExponentialNoise(optimizer, gamma=0.8)
        clip.step()
        noise.step()
        if not noisy:
            optimizer.noise_multiplier = 0
        backward(module, 3)
        optimizer.pre_step()
        steps[noisy] = [p.grad.clone() for p in optimizer.params]
    generator, multiplier = torch.Generator().manual_seed(3), 0.5 * 0.8
    if clipping == "adaptive":
        multiplier = (multiplier**-2 - 2.0**-2) ** -0.5  # Theorem 1 of the paper
    for with_noise, without in zip(steps[True], steps[False], strict=True):
        drawn = torch.normal(0, multiplier * BOUND / 2, without.shape, dtype=torch.float64, generator=generator)
        torch.testing.assert_close(with_noise - without, drawn, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("clipping", "noise"), [("flat", 1), ("adaptive", (1 - 2.0**-2) ** -0.5)])
def test_a_bound_that_falls_within_a_step_leaves_its_noise(clipping: str, noise: float) -> None:
    """The samples of the first part were clipped to the larger bound. Theorem 1 of the paper gives adaptive noise."""
    module, optimizer = private(clipping, noise_multiplier=1.0)
    optimizer.signal_skip_step(True)
    backward(module, 3)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.max_grad_norm = BOUND / 10
    optimizer.signal_skip_step(False)
    backward(module, 3)
    optimizer.clip_and_accumulate()
    assert optimizer.noise_std() == pytest.approx(noise * BOUND)
    optimizer.zero_grad()
    optimizer._is_last_step_skipped = False
    optimizer.zero_grad()
    backward(module, 3)
    optimizer.clip_and_accumulate()
    assert optimizer.noise_std() == pytest.approx(noise * BOUND / 10)


def test_bounds_are_in_the_order_of_the_optimizer() -> None:
    model = nn.Linear(9, 4).double()
    module = GradSampleModuleFlashClip(model, loss_reduction="sum", max_grad_norm=[0.1, 0.2], clipping="per_layer")
    inner = torch.optim.SGD([model.bias, model.weight])
    options: dict[str, Any] = {"noise_multiplier": 0.0, "expected_batch_size": 1, "loss_reduction": "sum"}
    optimizer = DPOptimizerFlashClip(inner, module=module, max_grad_norm=[0.1, 0.2], **options)
    backward(module, 4)
    optimizer.pre_step()
    norms = [float(p.grad.norm()) for p in (model.bias, model.weight) if p.grad is not None]
    assert norms == pytest.approx([0.4, 0.8], rel=1e-5)


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), None, "1"])
def test_bounds_that_are_no_bounds(value: Any, clipping: str) -> None:
    _, optimizer = private(clipping)
    with pytest.raises(MemprofError, match=r"max_grad_norm would become .*; give a positive and finite number"):
        optimizer.max_grad_norm = value
    assert optimizer.max_grad_norm == pytest.approx(BOUND)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_noise_multipliers_that_are_none(value: float) -> None:
    _, optimizer = private()
    with pytest.raises(MemprofError, match=r"noise_multiplier would become .*; give a finite number"):
        optimizer.noise_multiplier = value


@pytest.mark.parametrize(
    ("clipping", "bound"),
    [("flat", float("inf")), ("flat", float("nan")), ("automatic", "1"), ("per_layer", [1.0, float("inf")])],
)
def test_rules_need_finite_bounds(clipping: Any, bound: Any) -> None:
    with pytest.raises(MemprofError, match="finite number"):
        ClipRule(clipping, bound)


def _split() -> tuple[Any, Any, Any, torch.Tensor]:
    """A linear layer whose samples have the gradients (x, 1), in parts of two, and their clipped sum by hand."""
    torch.manual_seed(0)
    data = vector_data(4)
    x = torch.stack([row for row, _ in data])
    norms = (x.square().sum(1) + 1).sqrt()
    assert bool((norms > BOUND).all())
    by_hand = (BOUND / (norms + 1e-6)) @ x
    module, optimizer, loader = make_private(
        nn.Linear(9, 1).double(),
        data,
        "flash_clip",
        batch=4,
        loss_reduction="sum",
        max_grad_norm=BOUND,
        noise_multiplier=0,
    )
    manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer)
    return module, optimizer, manager, by_hand


@pytest.mark.parametrize("has_step", [True, False])
@pytest.mark.parametrize("is_same_manager", [True, False])
@pytest.mark.parametrize("clears_first", [True, False])
def test_an_unfinished_logical_batch_is_dropped_when_the_loop_ends(
    clears_first: bool, is_same_manager: bool, has_step: bool
) -> None:
    """Otherwise the part's samples would count twice in the next step."""
    module, optimizer, manager, by_hand = _split()
    with manager as parts:
        for x, _ in parts:
            module(x).sum().backward()
            if has_step:
                optimizer.step()
            break
        with manager if not is_same_manager else nullcontext(parts) as anew:
            iterator = iter(anew)
            if has_step:
                with pytest.warns(UserWarning, match="before a logical batch has come to its step"):
                    first = next(iterator)
            else:
                first = next(iterator)
            for x, _ in (first, *iterator):
                if clears_first:
                    optimizer.zero_grad()
                module(x).sum().backward()
                optimizer.step()
                found = module._module.weight.grad
                if not clears_first:
                    optimizer.zero_grad()
    assert not optimizer._step_skip_queue
    torch.testing.assert_close(found[0], by_hand)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_batch_that_its_loop_has_left_joins_no_other(is_ahead: bool) -> None:
    """After the loop over parts is left, a loop over the loader itself has batches of its own."""
    module, optimizer, manager, by_hand = _split()
    optimizer.drawn = DrawnBatches.of(manager.data_loader)  # as of make_private with Poisson sampling
    with manager as parts:
        iterator = iter(parts)
        x, _ = next(iterator)
        module(x).sum().backward()
        optimizer.step()
        if is_ahead:  # as workers are
            next(iterator)
    for x, _ in manager.data_loader:
        optimizer.zero_grad()
        module(x).sum().backward()
        with pytest.warns(UserWarning, match="or was left, before a logical batch has come to its step"):
            optimizer.step()
    assert not optimizer._is_last_step_skipped
    torch.testing.assert_close(module._module.weight.grad[0], by_hand)


def test_an_inspected_batch_does_not_count_as_a_step() -> None:
    module, optimizer, manager, _ = _split()
    with manager as parts:
        next(iter(parts))
        for x, _ in parts:
            module(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            assert not optimizer._step_skip_queue
    assert not optimizer._is_last_step_skipped


@pytest.mark.parametrize("fails_in", ["forward", "step"])
def test_a_part_with_a_swallowed_error_joins_no_other_batch(fails_in: str) -> None:
    """Its flag would be the next part's, and so on, so that a sum would have parts of two logical batches."""
    module, optimizer, manager, _ = _split()
    with manager as parts:
        loop = iter(parts)
        x, _ = next(loop)
        module(x)
        if fails_in != "forward":
            module(x).sum().backward()
        x, _ = next(loop)
        optimizer.zero_grad()
        module(x).sum().backward()
        with pytest.raises(MemprofError, match=r"without optimizer.step\(\) for the part before"):
            optimizer.step()
    assert not optimizer._step_skip_queue
    assert all(parameter.summed_grad is None for parameter in module.parameters())
    assert not optimizer._is_last_step_skipped


@pytest.mark.parametrize("prefetches", ["before the forward", "before the step", "two ahead"])
def test_parts_that_are_read_ahead_are_not_refused(prefetches: str) -> None:
    module, optimizer, manager, by_hand = _split()
    with manager as parts:
        loop = iter(parts)
        waiting = [x for x, _ in islice(loop, 2 if prefetches == "two ahead" else 1)]
        while waiting:
            if prefetches != "before the step":
                waiting += [x for x, _ in islice(loop, 1)]
            optimizer.zero_grad()
            loss = module(waiting.pop(0)).sum()
            if prefetches == "before the step":
                waiting += [x for x, _ in islice(loop, 1)]
            loss.backward()
            optimizer.step()
    torch.testing.assert_close(module._module.weight.grad[0], by_hand)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("later", [BOUND / 4, 4 * BOUND])
def test_a_bound_changed_before_step_holds_for_sum_and_noise(passes: int, later: float) -> None:
    """One pass clips in the step, and two passes have clipped in backward."""
    module, optimizer = private(noise_multiplier=2.0, flash_clip_passes=passes)
    backward(module, 3)
    optimizer.max_grad_norm = later
    optimizer.clip_and_accumulate()
    total = math.sqrt(sum(float(p.summed_grad.square().sum()) for p in module.parameters()))
    assert total == pytest.approx(3 * (later if passes == 1 else BOUND), rel=1e-5)
    assert optimizer.noise_std() == pytest.approx(2 * total / 3, rel=1e-5)
