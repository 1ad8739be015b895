# SPDX-License-Identifier: Apache-2.0
"""Of programs after reports of users, the first finding names the cause, and following its advice cures it."""

from pathlib import Path

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.analysis.verdict_view import device_verdict
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.units import format_bytes
from tests.gallery.failures import BATCH, CLASSES, GALLERY, Report, private, train, trained_beside_the_optimizer
from tests.integration.planted_findings import kinds, profiled

pytestmark = [pytest.mark.usefixtures("clean_process"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("report", GALLERY, ids=str)
def test_the_first_finding_names_the_cause(report: Report, tmp_path: Path) -> None:
    first, *_ = profiled(tmp_path, lambda session: report.program(False), report.error)["findings"]
    assert first["kind"] == report.kind
    assert all(part in first["evidence"] for part in report.evidence), first["evidence"]
    assert report.remedy in first["remedy"], first["remedy"]
    assert ("flash_clip" in first["remedy"]) == report.flash_clip


@pytest.mark.parametrize("program", ["own_optimizer_steps", "broadcast_positions", "accumulated_in_ghost"])
def test_the_readme_quotes_what_is_said(program: str, tmp_path: Path) -> None:
    (report,) = (each for each in GALLERY if str(each) == program)
    first, *_ = profiled(tmp_path, lambda session: report.program(False), report.error)["findings"]
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert report.link in readme
    assert first["evidence"].partition(". ")[0] in " ".join(readme.split())


@pytest.mark.parametrize("report", GALLERY, ids=str)
def test_following_the_advice_cures(report: Report, tmp_path: Path) -> None:
    profile = profiled(tmp_path, lambda session: report.program(True))
    causes = {each.kind for each in GALLERY}
    assert not kinds(profile) & causes


@pytest.mark.parametrize("report", [report for report in GALLERY if report.flash_clip], ids=str)
def test_flash_clip_trains_where_it_is_offered(report: Report, tmp_path: Path) -> None:
    profile = profiled(tmp_path, lambda session: report.program(False, "flash_clip"))
    assert not kinds(profile) & {each.kind for each in GALLERY}


class Adapter(nn.Module):
    """A frozen weight and a trained update of low rank in one module, of which Opacus has no sampler."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256) / 16, requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(2, 256) / 16), nn.Parameter(torch.randn(256, 2) / 16)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + x @ self.down.T @ self.up.T


def accumulating(
    model: nn.Module, mode: str = "hooks", *, batches: int = 1, manager: bool = False, **options: str
) -> None:
    """Trains on 64 samples in batches of BATCH, with a step after `batches` of them, or with BatchMemoryManager."""
    made, optimizer, loader, _ = private(model, torch.randn(64, 256), mode, **options)
    if manager:
        loader = DataLoader(loader.dataset, batch_size=64)
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=BATCH, optimizer=optimizer) as parts:
            train(made, optimizer, parts)
        return
    for number, (x, y) in enumerate(loader, 1):
        functional.cross_entropy(made(x), y).backward()
        if number % batches == 0:
            optimizer.step()
            optimizer.zero_grad()


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, CLASSES))


def test_clipping_each_batch_takes_what_is_predicted(tmp_path: Path) -> None:
    by_hand = profiled(tmp_path / "by_hand", lambda session: accumulating(wide(), batches=8))["devices"]["cpu"]
    predicted = {each["title"].split()[0]: each["predicted_peak_bytes"] for each in by_hand["improvements"]}
    assert sorted(predicted) == ["clipping", 'grad_sample_mode="flash_clip"']  # ghost would discard seven of eight
    managed = profiled(tmp_path / "managed", lambda session: accumulating(wide(), manager=True))["devices"]["cpu"]
    peak = managed["peak"]["requested_bytes"]
    assert predicted["clipping"] == pytest.approx(peak, rel=0.03)
    assert peak < 0.5 * by_hand["peak"]["requested_bytes"]


def test_the_frozen_part_of_a_module_is_predicted(tmp_path: Path) -> None:
    """Removing the copy saves little where functorch computes gradients of a frozen weight, 128 times the others."""
    device = profiled(tmp_path, lambda session: accumulating(Adapter()))["devices"]["cpu"]
    frozen = 4 * BATCH * 256 * 256
    assert device["peak"]["requested_bytes"] > frozen
    for each in device["improvements"]:
        assert each["predicted_peak_bytes"] > frozen or "flash_clip" in each["title"], each["title"]


def test_a_proof_causes_no_advice(tmp_path: Path) -> None:
    """flash_clip's proof in the first step forms per-sample gradients, which are no waste of the program."""
    profile = profiled(tmp_path / "proved", lambda session: accumulating(wide(), "flash_clip"))
    assert not kinds(profile) & {"per_sample_gradients_in_forward", "copied_per_sample_gradients"}
    (verdict,) = (device_verdict(name, device) for name, device in profile["devices"].items())
    assert "COULD BE" not in dict(verdict.lines)


def test_the_peaks_of_a_proof_and_the_training_are_distinguished(tmp_path: Path) -> None:
    profile = profiled(tmp_path / "proved", lambda session: accumulating(wide(), "flash_clip"))
    unproved = profiled(tmp_path / "plain", lambda session: accumulating(wide(), "flash_clip", check="off"))
    device, plain = profile["devices"]["cpu"], unproved["devices"]["cpu"]["peak"]
    assert device["peak"]["phase"] == "proof"
    assert device["phases"]["proof"]["peak_bytes"] == device["peak"]["requested_bytes"] > plain["requested_bytes"]
    others = [row["peak_bytes"] for phase, row in device["phases"].items() if phase != "proof"]
    assert max(others) == pytest.approx(plain["requested_bytes"], rel=0.03)  # with a copy of the batch
    verdict = device_verdict("cpu", device)
    assert "flash_clip's proof of step 0" in verdict.where
    assert dict(verdict.lines)["WITHOUT THE PROOF"].startswith(format_bytes(max(others)))


def test_a_killed_run_gets_only_advice_that_its_events_support(tmp_path: Path) -> None:
    """Who should have cleared the gradients is not in the events, so that the remedy names both possibilities."""
    profiled(tmp_path, lambda session: trained_beside_the_optimizer(False))
    whole = (tmp_path / "profile.json").read_text()
    (tmp_path / "profile.json").write_text(whole[: len(whole) // 2])
    profile = load_profile(tmp_path)
    (growing,) = (each for each in profile["findings"] if each["kind"] == "growing_memory")
    assert "zero_grad" in growing["remedy"]
    assert "freeze" in growing["remedy"]
    assert profile["status"] == "killed"
    assert any("cut off" in warning for warning in profile["warnings"])
    (tmp_path / "events.bin").unlink()
    with pytest.raises(MemprofError, match="cannot be read"):
        load_profile(tmp_path)
