# SPDX-License-Identifier: Apache-2.0
"""What flash_clip keeps between backward and step has its categories, to the byte."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from opacus_memprof import hooks
from opacus_memprof.clipping.kernels import sums
from opacus_memprof.clipping.proof.situations import Situations
from opacus_memprof.recording import native
from tests.integration.flash_clip_models import Transformer, criterion, make_private, token_data, vector_data
from tests.integration.opacus_training import categories, cpu  # noqa: F401
from tests.planted_oom import FIRST_BLOCK_PLANS, Changes, Plan, train

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

BATCH, TOKENS, DOUBLE = 4, 7, 8
KEPT = ("activation_hooks_opacus_only", "backprop_copies", "per_sample_gradients", "norm_samples", "summed_gradients")


def small(passes: int, check: str = "off") -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 50), nn.Linear(50, 50, bias=False)).double()
    module, optimizer, _ = make_private(model, vector_data(8), "flash_clip", flash_clip_passes=passes, check=check)
    return module, optimizer


def backward(module: Any) -> None:
    module(torch.randn(BATCH, TOKENS, 6, dtype=torch.float64)).square().sum((1, 2)).mean().backward()


def change_since(before: dict[str, int]) -> dict[str, int]:
    after = categories()
    return {name: after[name] - before[name] for name in KEPT if after[name] != before[name]}


def kept_by_module() -> dict[tuple[str, str], int]:
    found: Counter[tuple[str, str]] = Counter()
    for block in native.live_blocks():
        if block["category"] in KEPT:
            found[block["module"], block["category"]] += block["bytes"]
    return dict(found)


def test_one_pass_keeps_the_smaller_of_pairs_and_samples(cpu: None) -> None:  # noqa: F811
    module, optimizer = small(passes=1)
    attachments = [hooks.attach_model(module), hooks.attach_optimizer(optimizer)]
    before = categories()
    backward(module)
    pair = BATCH * TOKENS * 50 * DOUBLE  # of the second Linear: its input, and its output's gradient
    samples = BATCH * (6 * 50 + 50) * DOUBLE  # of the first: weight and bias
    assert change_since(before) == {
        "activation_hooks_opacus_only": pair,
        "backprop_copies": pair,
        "per_sample_gradients": samples,
        "norm_samples": BATCH * DOUBLE,  # of the second: those of small per-sample gradients wait for the step
    }
    assert kept_by_module() == {
        ("1", "activation_hooks_opacus_only"): pair,
        ("1", "backprop_copies"): pair,
        ("1", "norm_samples"): BATCH * DOUBLE,
        ("0", "per_sample_gradients"): samples,
    }
    optimizer.step()  # p.grad shows the sum with its noise, in the sum's own memory
    assert change_since(before) == {}
    gradients = (6 * 50 + 50 + 50 * 50) * DOUBLE
    assert categories()["gradients"] - before["gradients"] == gradients
    optimizer.zero_grad()
    for attachment in attachments:
        attachment.detach()


def test_a_checked_step_keeps_its_batch_and_output_gradients(cpu: None) -> None:  # noqa: F811
    module, optimizer = small(passes=1, check="first")
    attachments = [hooks.attach_model(module), hooks.attach_optimizer(optimizer)]
    before = categories()
    backward(module)
    pair = BATCH * TOKENS * 50 * DOUBLE  # of the second Linear, whose output is the model's
    assert change_since(before)["backprop_copies"] == 2 * pair
    assert categories()["inputs"] - before["inputs"] == BATCH * TOKENS * 6 * DOUBLE
    optimizer.step()
    assert change_since(before) == {}
    for attachment in attachments:
        attachment.detach()


def test_a_second_training_is_proved_as_often_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows the steps of a training for the next one is not there where another training is proved."""
    prove, proofs = Situations.prove, []

    def counted(*args: Any) -> Any:
        proofs[-1] += 1
        return prove(*args)

    monkeypatch.setattr(Situations, "prove", counted)
    trainings = []  # whether a training is still alive makes no difference
    for _ in range(3):
        proofs.append(0)
        trainings.append(small(passes=1, check="always"))
        for _ in range(2):
            backward(trainings[-1][0])
            trainings[-1][1].step()
            trainings[-1][1].zero_grad()
    assert proofs == [1, 1, 1]


def test_noise_takes_no_more_than_that_of_the_largest_parameter(cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    module, optimizer = small(passes=1)
    attachments = [hooks.attach_model(module), hooks.attach_optimizer(optimizer)]
    backward(module)
    draw, seen = sums.draw_normal, []

    def draw_normal(*args: Any) -> list[torch.Tensor]:
        drawn = draw(*args)
        blocks = [block for block in native.live_blocks() if block["category"] == "noise"]
        seen.append({(block["module"], block["bytes"]) for block in blocks})
        return drawn

    monkeypatch.setattr(sums, "draw_normal", draw_normal)
    optimizer.step()
    weight, bias = ("0", 50 * 6 * DOUBLE), ("0", 50 * DOUBLE)
    assert seen == [{weight}, {weight, bias}, {("1", 50 * 50 * DOUBLE)}]
    for attachment in attachments:
        attachment.detach()


def test_two_passes_keep_norms_and_sums(cpu: None) -> None:  # noqa: F811
    module, optimizer = small(passes=2)
    attachment = hooks.attach_model(module)
    before = categories()
    backward(module)
    sums = (6 * 50 + 50 + 50 * 50) * DOUBLE
    assert change_since(before) == {"norm_samples": 3 * BATCH * DOUBLE, "summed_gradients": sums}
    optimizer.zero_grad()
    assert change_since(before) == {}
    attachment.detach()


@pytest.mark.parametrize("passes", [1, 2])
def test_following_changes_nothing_and_ends(passes: int, cpu: None) -> None:  # noqa: F811
    def run(followed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module, optimizer, _ = make_private(
            Transformer(), token_data(8), "flash_clip", flash_clip_passes=passes, check="off"
        )
        attachments = [hooks.attach_model(module), hooks.attach_optimizer(optimizer)] if followed else []
        ids, target = token_data(4).tensors
        for _ in range(2):
            criterion("mean")(module(ids), target).backward()
            optimizer.step()
            optimizer.zero_grad()
        for attachment in attachments:
            attachment.detach()
        return [parameter.detach().clone() for parameter in module.parameters()]

    add = type(small(1)[0].bookkeeping).add
    assert all(torch.equal(a, b) for a, b in zip(run(followed=True), run(followed=False), strict=True))
    assert type(small(1)[0].bookkeeping).add is add


@pytest.mark.parametrize("batch", [2, 8])
@pytest.mark.parametrize("plan", [plan for plan in FIRST_BLOCK_PLANS if "LoRA" not in plan.name], ids=str)
def test_the_first_step_needs_no_more_than_the_second(plan: Plan, batch: int, tmp_path: Path) -> None:
    """Though it runs the model on a few samples first."""
    plan = replace(plan, cpu={**plan.cpu, "batch": batch})
    train(plan, "cpu", tmp_path, changes=Changes(mode="flash_clip"))
    steps = json.loads((tmp_path / "profile.json").read_text())["devices"]["cpu"]["steps"]
    assert 0 < steps[0]["peak_bytes"] <= steps[1]["peak_bytes"]
