# SPDX-License-Identifier: Apache-2.0
"""Running out of memory under a profile, on a CPU that is limited as a device would be."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import opacus_memprof
from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.analysis.verdict_view import failure_verdict
from opacus_memprof.profiles.oom_report import OomReport
from opacus_memprof.pytest_plugin.clean_session import empty_caches
from opacus_memprof.recording import native
from opacus_memprof.reports.summary import format_verdict
from opacus_memprof.session.out_of_memory import _attach
from tests.planted_models import ValueDependent
from tests.planted_oom import FIRST_BLOCK_PLANS, PLANS, Changes, Plan, train

# The others take as long and tell less here; all are planted on a GPU (tests/gpu/test_oom_cuda.py).
QUICK = (
    "the same, tighter",
    "ghost clipping's T x T matrices",
    "the same, in the first block",
    "noise of a big embedding",
    "Adam's states in the first step",
    "casts of bfloat16 in clipping",
    "a Poisson batch larger than those before",
    "outputs that are kept",
    "forwards without a backward",
)
FLASH_CLIP = {"kind": "grad_sample_mode", "value": "flash_clip"}
REPORTS = ["oom_report.html", "oom_report.json", "oom_report.txt"]


@pytest.fixture(autouse=True)
def _unlimited(clean_process: None) -> Any:
    yield
    native.cpu_limit(0)


@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan.name in QUICK], ids=str)
def test_the_first_suggestion_makes_it_fit(plan: Plan, tmp_path: Path) -> None:
    needs = train(plan, "cpu", tmp_path / "needs")
    assert needs.error is None
    assert needs.report is None
    had = int(needs.peak * plan.limit)
    failed = train(plan, "cpu", tmp_path / "failed", had)
    assert isinstance(failed.error, torch.OutOfMemoryError)
    assert failed.report is not None
    assert failed.report["room"]["limit_bytes"] == had
    first = failed.report["suggestions"][0]
    assert first["fits"]
    followed = train(plan, "cpu", tmp_path / "followed", had, Changes.from_actions(first["actions"]))
    assert followed.error is None
    assert first["predicted_peak_bytes"] == pytest.approx(followed.peak, rel=0.1)
    if plan.quirk != "captures":  # ten forwards come, of which it saw a few
        assert failed.report["needed"]["bytes"] == pytest.approx(needs.peak, rel=0.2 if plan.quirk else 0.1)


@pytest.mark.parametrize(("limit", "guessed"), [(150_000, True), (2_500_000, False)])
def test_a_prediction_that_rests_on_no_whole_block_says_so(limit: int, guessed: bool, tmp_path: Path) -> None:
    """In the first repeated block, what a block keeps is unknown if the forward cannot run on fake tensors."""
    (plan,) = (plan for plan in PLANS if plan.name == "the same, in the first block")
    plan = replace(plan, build=ValueDependent)
    report = train(plan, "cpu", tmp_path, limit + model_bytes(plan)).report
    assert not any("the profiler failed" in warning for warning in load_profile(tmp_path).warnings)
    assert report is not None
    assert report["request"]["module"].startswith("blocks.0") == guessed
    (clipped,) = (suggestion for suggestion in report["suggestions"] if suggestion["actions"] == [FLASH_CLIP])
    assert ("what the others keep is a guess" in clipped["computed"]) == guessed


@pytest.mark.parametrize("plan", FIRST_BLOCK_PLANS, ids=str)
def test_flash_clip_is_predicted_from_the_first_block(plan: Plan, tmp_path: Path) -> None:
    """At most 3 % less than what is then measured, wherever memory runs out: also before any block has ended."""
    needs = train(plan, "cpu", tmp_path / "needs")
    failed = train(plan, "cpu", tmp_path / "failed", int(needs.peak * plan.limit))
    assert failed.report is not None
    assert failed.report["request"]["phase"] == "forward"
    assert failed.report["request"]["module"].startswith(("blocks.0", "0"))
    (suggestion,) = (suggestion for suggestion in failed.report["suggestions"] if suggestion["actions"] == [FLASH_CLIP])
    assert "guess" not in suggestion["computed"]
    measured = train(plan, "cpu", tmp_path / "followed", changes=Changes(mode="flash_clip")).peak
    assert 0.97 * measured <= suggestion["predicted_peak_bytes"] <= 1.15 * measured


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.parametrize("limit", [0.6, 0.8])
def test_per_sample_gradients_without_a_copy(mode: str, limit: float, tmp_path: Path) -> None:
    """Where the copy of the largest layer's makes the peak, the prediction is what is then measured."""
    plan = replace(PLANS[0], mode=mode, limit=limit)
    needs = train(plan, "cpu", tmp_path / "needs")
    assert needs.phase == "backward"
    failed = train(plan, "cpu", tmp_path / "failed", int(needs.peak * limit))
    assert failed.report is not None
    (suggestion,) = (
        suggestion
        for suggestion in failed.report["suggestions"]
        if suggestion["actions"] == [{"kind": "adopt_grad_samples"}]
    )
    followed = train(plan, "cpu", tmp_path / "followed", changes=Changes.from_actions(suggestion["actions"]))
    assert followed.peak < needs.peak
    assert 0.97 * followed.peak <= suggestion["predicted_peak_bytes"] <= 1.05 * followed.peak
    assert suggestion["fits"] == (followed.peak <= int(needs.peak * limit))


def model_bytes(plan: Plan) -> int:
    return sum(parameter.nbytes for parameter in plan.build(plan.cpu).parameters())


def fill(session: Any, blocks: list[torch.Tensor]) -> None:
    """Memory that a program holds, under names, and then a request that is one byte too many."""
    with opacus_memprof.tag("teacher"):
        blocks.append(torch.empty(3_000_000, dtype=torch.uint8))
    with opacus_memprof.tag("cache"):
        blocks.append(torch.empty(1_000_000, dtype=torch.uint8))
    native.cpu_limit(native.cpu_reported_bytes() + 499_999)
    try:
        with opacus_memprof.tag("cache"):
            torch.empty(500_000, dtype=torch.uint8)
    finally:
        native.cpu_limit(0)


def report_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "oom_report.json").read_text())


def test_who_holds_what_and_what_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError), opacus_memprof.profile(tmp_path, device="cpu") as session:
        fill(session, [])
    report = report_of(tmp_path)
    assert (report["request"]["bytes"], report["request"]["category"]) == (500_000, "cache")
    in_use = report["holders"]["categories"]
    assert (in_use["teacher"], in_use["cache"]) == (3_000_000, 1_000_000)
    assert sum(in_use.values()) == report["live_bytes"]
    assert sum(sum(sizes.values()) for sizes in report["holders"]["modules"].values()) == report["live_bytes"]
    assert sum(step["bytes"] for step in report["holders"]["steps"]) == report["live_bytes"]
    (failure,) = json.loads((tmp_path / "profile.json").read_text())["devices"]["cpu"]["out_of_memory"]
    assert failure["live_bytes"] == report["live_bytes"]  # the event file's account of the same instant
    assert failure["categories"] == in_use


def test_a_full_event_file_does_not_cost_the_report(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError), opacus_memprof.profile(tmp_path, device="cpu", max_events=1) as session:
        fill(session, [])
    assert report_of(tmp_path)["holders"]["categories"]["teacher"] == 3_000_000


def test_the_exception_stays_torchs_and_carries_a_note(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught, opacus_memprof.profile(tmp_path, device="cpu") as session:
        fill(session, [])
    assert type(caught.value) is torch.OutOfMemoryError
    assert str(caught.value).startswith("CPU out of memory. Tried to allocate 500000 bytes;")
    assert caught.value.args == (str(caught.value),)
    (note,) = caught.value.__notes__
    assert "488.28 KiB of cache" in note
    assert str(tmp_path / "oom_report.txt") in note


def test_a_program_that_handles_it_sees_note_and_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    with opacus_memprof.profile(tmp_path, device="cpu") as session:
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError) as caught:
                fill(session, [])
            assert len(caught.value.__notes__) == 1
            assert sorted(path.name for path in tmp_path.glob("oom_report.*")) == REPORTS
    assert json.loads((tmp_path / "profile.json").read_text())["status"] == "finished"
    assert len(report_of(tmp_path)["earlier_failures"]) == 2
    assert capsys.readouterr().err.count("OUT OF MEMORY ") == 1


def test_a_failure_that_is_not_torchs_out_of_memory_error(tmp_path: Path) -> None:
    """What a CPU raises by itself: a plain RuntimeError."""
    with opacus_memprof.profile(tmp_path / "handled", device="cpu"), pytest.raises(RuntimeError):
        torch.empty(2**60, dtype=torch.uint8)
    assert report_of(tmp_path / "handled")["request"]["bytes"] == 2**60
    with pytest.raises(RuntimeError) as caught, opacus_memprof.profile(tmp_path / "raised", device="cpu"):
        torch.empty(2**60, dtype=torch.uint8)
    assert str(2**60) in str(caught.value)
    assert "1048576.00 TiB" in caught.value.__notes__[0]


def test_other_exceptions_get_no_note_and_fitting_runs_no_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine") as caught, opacus_memprof.profile(tmp_path, device="cpu"):
        raise ValueError("mine")
    assert not hasattr(caught.value, "__notes__")
    assert not list(tmp_path.glob("oom_report.*"))


def test_a_handled_error_adds_no_note_to_a_later_one(tmp_path: Path) -> None:
    def program() -> None:
        with contextlib.suppress(RuntimeError):
            torch.empty(2**60, dtype=torch.uint8)
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught, opacus_memprof.profile(tmp_path, device="cpu"):
        program()
    assert not hasattr(caught.value, "__notes__")
    assert report_of(tmp_path)["request"]["bytes"] == 2**60


def test_torchs_class_is_as_it_was_afterwards(tmp_path: Path) -> None:
    before = dict(vars(torch.OutOfMemoryError))
    with opacus_memprof.profile(tmp_path, device="cpu"):
        assert torch.OutOfMemoryError("a program's own").args == ("a program's own",)
    assert dict(vars(torch.OutOfMemoryError)) == before
    assert not list(tmp_path.glob("oom_report.*"))


def test_trouble_in_explaining_does_not_hide_the_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opacus_memprof.session.out_of_memory.build_report", lambda *_: 1 / 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(torch.OutOfMemoryError), opacus_memprof.profile(tmp_path, device="cpu") as session:
            fill(session, [])
    assert "could not be explained" in str(caught[0].message)
    assert json.loads((tmp_path / "profile.json").read_text())["status"] == "out_of_memory"


def test_the_next_session_is_not_in_the_forward_that_failed(tmp_path: Path) -> None:
    model = nn.Linear(64, 512)
    with opacus_memprof.profile(tmp_path / "failed", device="cpu") as session:
        session.attach(model)
        inputs = torch.randn(32, 64)
        native.cpu_limit(native.cpu_reported_bytes() + 10_000)
        with pytest.raises(torch.OutOfMemoryError):
            model(inputs)
    native.cpu_limit(0)
    with opacus_memprof.profile(tmp_path / "next", device="cpu") as session:
        in_use = torch.zeros(1_000_000, dtype=torch.uint8)
        assert session.breakdown()["cpu"]["unattributed"] == in_use.nbytes


def test_a_plain_model(tmp_path: Path) -> None:
    """Without Opacus there is neither a mode nor a BatchMemoryManager to suggest."""
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
    with opacus_memprof.profile(tmp_path, device="cpu") as session:
        session.attach(model)
        native.cpu_limit(native.cpu_reported_bytes() + 100_000)
        with pytest.raises(torch.OutOfMemoryError):
            model(torch.randn(32, 64)).sum().backward()
    report = report_of(tmp_path)
    assert (report["mode"], report["batch"]["samples"]) == ("", 32)
    assert report["suggestions"][0]["actions"] == [{"kind": "dtype", "value": "bfloat16"}]


class NextWords(nn.Module):
    """A language model with more words than anything else."""

    def __init__(self, *, in_logarithms: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(3000, 8), nn.Linear(8, 3000, bias=False)
        self.in_logarithms = in_logarithms

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.relu(self.words(ids)))
        return nn.functional.log_softmax(logits, -1) if self.in_logarithms else logits


def deep() -> nn.Module:
    """Its per-sample gradients take as much as its activations."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(nn.Embedding(10, 64), *layers, nn.Linear(64, 10))


def private(model: nn.Module, batches: list[torch.Tensor]) -> tuple[Any, Any]:
    made, optimizer, _ = opacus_memprof.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters()),
        data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.cat(batches)), len(batches[0])),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    return made, optimizer


def clears_after_forward(model: Any, optimizer: Any, batches: list[torch.Tensor]) -> None:
    for ids in batches:
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def clears_before_forward(model: Any, optimizer: Any, batches: list[torch.Tensor]) -> None:
    for ids in batches:
        optimizer.zero_grad()
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()


def clears_after_step(model: Any, optimizer: Any, batches: list[torch.Tensor]) -> None:
    for ids in batches:
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def of_logarithms(model: Any, optimizer: Any, batches: list[torch.Tensor]) -> None:
    for ids in batches:
        output = model(ids)
        loss = nn.functional.nll_loss(output.flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def peak_of_training(
    loop: Any, build: Any, directory: Path, limit: int = 0, *, is_private: bool = True
) -> tuple[int, dict[str, Any] | None]:
    """The peak of three steps, and the report if `limit` bytes beside the model are too few."""
    empty_caches()
    gc.collect()  # private models are in reference cycles
    torch.manual_seed(0)
    batches = list(torch.randint(10, (3, 8, 64 if build is deep else 12)))
    with opacus_memprof.profile(directory, device="cpu") as session, contextlib.suppress(torch.OutOfMemoryError):
        model: Any = build()
        if is_private:
            model, optimizer = private(model, batches)
        else:
            session.attach(model)
            optimizer = torch.optim.Adam(model.parameters())
            session.attach(optimizer)
        if limit:
            native.cpu_limit(native.cpu_reported_bytes() + limit)
        loop(model, optimizer, batches)
    native.cpu_limit(0)
    ended = json.loads((directory / "profile.json").read_text())
    report = directory / "oom_report.json"
    return ended["devices"]["cpu"]["peak"]["requested_bytes"], (
        json.loads(report.read_text()) if report.exists() else None
    )


def report_with(loop: Any, build: Any, directory: Path, phase: str, peak: int, **options: Any) -> dict[str, Any]:
    """The report of the first limit with which memory runs out in this phase of the first step."""
    for part in (0.15, 0.3, 0.5, 0.6):
        _, report = peak_of_training(loop, build, directory / str(part), int(part * peak), **options)
        assert report is not None
        if (report["request"]["phase"], report["request"]["step"]) == (phase, 0):
            return report
    raise AssertionError(phase)


@pytest.mark.parametrize(
    ("phase", "is_private"),
    [("forward", True), ("backward", True), ("forward", False)],
    ids=["forward", "backward", "forward without Opacus"],
)
def test_gradients_cleared_after_the_forward_pass_live_in_it(phase: str, is_private: bool, tmp_path: Path) -> None:
    """The peak is in the second forward pass, of which the failed first step shows no more than the order of calls."""
    late, _ = peak_of_training(clears_after_forward, deep, tmp_path / "late", is_private=is_private)
    report = report_with(clears_after_forward, deep, tmp_path, phase, late, is_private=is_private)
    assert report["needed"]["bytes"] == pytest.approx(late, rel=0.03)
    early, _ = peak_of_training(clears_before_forward, deep, tmp_path / "early", is_private=is_private)
    other = report_with(clears_before_forward, deep, tmp_path / "other", phase, early, is_private=is_private)
    assert other["needed"]["bytes"] == pytest.approx(early, rel=0.03)
    if is_private:
        assert early < 0.9 * late
        (cured,) = (each for each in report["suggestions"] if each["actions"] == [{"kind": "clear_gradients"}])
        assert cured["predicted_peak_bytes"] == pytest.approx(early, rel=0.03)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_what_zero_grad_clears_after_the_step_does_not(phase: str, tmp_path: Path) -> None:
    """In the backward pass, too, zero_grad is what the loop calls next."""
    peak, _ = peak_of_training(clears_after_step, deep, tmp_path / "needs")
    report = report_with(clears_after_step, deep, tmp_path, phase, peak)
    assert report["needed"]["bytes"] == pytest.approx(peak, rel=0.03)


def test_the_gradients_of_the_loss_are_needed_after_its_first(tmp_path: Path) -> None:
    """Where logits are the most, the first of the loss' two gradients fails, and the second one is needed beside it."""
    peak, _ = peak_of_training(clears_before_forward, NextWords, tmp_path / "needs", is_private=False)
    report = report_with(clears_before_forward, NextWords, tmp_path, "backward", peak, is_private=False)
    assert report["request"]["module"] == ""
    assert report["needed"]["bytes"] == pytest.approx(peak, rel=0.03)
    # Logits, their logarithms, and the gradients of both.
    logits = 8 * 12 * 3000 * 4
    assert (report["loss"]["module"], report["loss"]["output_bytes"]) == ("head", logits)
    assert report["loss"]["bytes"] == pytest.approx(4 * logits, rel=0.03)
    screen = format_verdict(failure_verdict(msgspec.convert(report, OomReport)), 200)
    assert "THE LOSS takes 4.39 MiB of it: the model's output after head, 1.10 MiB" in screen
    _, report = peak_of_training(clears_before_forward, deep, tmp_path / "deep", 2**20, is_private=False)
    assert report is not None
    assert "loss" not in report


def test_an_output_after_the_last_layer_lives_through_the_step(tmp_path: Path) -> None:
    build = partial(NextWords, in_logarithms=True)
    peak, _ = peak_of_training(of_logarithms, build, tmp_path / "needs")
    report = report_with(of_logarithms, build, tmp_path, "backward", peak)
    assert report["needed"]["bytes"] == pytest.approx(peak, rel=0.03)


def peak_of_two_models(directory: Path, *, keeps: bool, limit: int | None = None) -> tuple[int, dict[str, Any] | None]:
    """The peak of a private model's training in front of another one's, and the report if memory runs out."""
    empty_caches()
    gc.collect()
    torch.manual_seed(0)
    batches = list(torch.randint(10, (3, 8, 64)))
    with opacus_memprof.profile(directory, device="cpu") as session, contextlib.suppress(torch.OutOfMemoryError):
        before = native.cpu_reported_bytes()
        other = nn.Sequential(nn.Linear(500, 300))
        its_optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
        session.attach(other)
        session.attach(its_optimizer)
        model, optimizer = private(deep(), batches)
        if limit is not None:
            native.cpu_limit(before + limit)
        for ids in batches:
            clears_after_step(model, optimizer, [ids])
            other(torch.randn(4, 500)).sum().backward()
            its_optimizer.step()
            its_optimizer.zero_grad(set_to_none=not keeps)
    native.cpu_limit(0)
    ended = json.loads((directory / "profile.json").read_text())["devices"]["cpu"]
    report = directory / "oom_report.json"
    return ended["peak"]["requested_bytes"], json.loads(report.read_text()) if report.exists() else None


@pytest.mark.parametrize("keeps", [False, True], ids=["states", "states and gradients"])
def test_what_another_model_keeps_is_live_from_its_first_step(keeps: bool, tmp_path: Path) -> None:
    """The first step had its peak without them; the second one fails before its own."""
    peak, _ = peak_of_two_models(tmp_path / "needs", keeps=keeps)
    kept = (1 + keeps) * 4 * (500 + 1) * 300
    _, report = peak_of_two_models(tmp_path / "lacks", keeps=keeps, limit=int(peak - 0.6 * kept))
    assert report is not None
    assert report["request"]["step"] == 2  # both optimizers' steps count
    assert report["needed"]["bytes"] == pytest.approx(peak, rel=0.03)


def test_an_exception_of_a_python_without_notes() -> None:
    class Old:
        __notes__ = ("before",)

    old = Old()
    _attach(old, "the note")  # type: ignore[arg-type]
    assert old.__notes__ == ["before", "the note"]
