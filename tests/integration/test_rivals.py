# SPDX-License-Identifier: Apache-2.0
"""benchmarks/rivals.py runs its small copies on the CPU, says who clips exactly, and gives rivals that fail a row."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CONFIG = "gpt2_T4096_B1_bf16"
OWN = ["hooks", "functorch", "ghost", "flash_clip"]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What says who clips exactly."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import rivals_exactness

    return rivals_exactness  # type: ignore[no-any-return]


def small_config() -> Any:
    import rivals_models

    return next(config.small for config in rivals_models.CONFIGS if config.name == CONFIG)


def fake_checkout(path: Path, package: str, source: str) -> Path:
    (path / package).mkdir(parents=True)
    (path / package / "__init__.py").write_text(source)
    return path


def test_the_small_copies_on_the_cpu(tmp_path: Path) -> None:
    engine = "class PrivacyEngine:\n    def __init__(self, *args, **kwargs): raise ValueError('no such layer | here')\n"
    fastdp = fake_checkout(tmp_path / "a", "fastDP", engine)
    flashnorm = fake_checkout(tmp_path / "b", "opacus", "raise SystemExit('this fork is broken')\n")
    options = ["--tiny", "--configs", CONFIG, "--fastdp", fastdp, "--flashnorm", flashnorm, "-o", tmp_path / "out"]
    command = [sys.executable, str(BENCHMARKS / "rivals.py"), *map(str, options)]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stderr
    results: dict[str, Any] = json.loads((tmp_path / "out/rivals.json").read_text())
    assert results["versions"].keys() >= {"opacus", "transformers", "fastDP", "FlashNorm"}
    by_library: dict[str, dict[str, Any]] = {}
    for row in results["rows"]:
        by_library.setdefault(row["library"], {})[row["mode"]] = row
    own = by_library["Opacus and flash_clip"]
    assert list(own) == ["vanilla", *OWN]
    for mode, row in own.items():
        assert row["seconds"] > 0
        assert row["time_ratio"] == pytest.approx(row["seconds"] / own["vanilla"]["seconds"])
        if mode != "vanilla":
            assert row["exactness"]["error"] <= 1e-10
            assert (row["exactness"]["wrong"], row["exactness"]["dtype"]) == (0, "float64")
    assert by_library["fastDP"]["vanilla"]["seconds"] > 0  # the others go on
    for mode in ("fastDP MixOpt", "fastDP ghost"):
        assert by_library["fastDP"][mode]["failed"] == "ValueError: no such layer | here"
    for row in by_library["FlashNorm"].values():
        assert row["failed"] == "the worker ended with status 1: this fork is broken"
    written = (tmp_path / "out/rivals.md").read_text()
    assert "| ValueError: no such layer / here | - | - | - |" in written
    assert "2.53 x (this project's earlier run on an H200, issue 23)" in written
    assert (tmp_path / "out/rivals.png").stat().st_size > 10_000
    assert (tmp_path / "out/rivals-dark.png").stat().st_size > 10_000


@pytest.mark.slow
def test_models_that_fsdp_shards(check: ModuleType, tmp_path: Path) -> None:
    """Two processes with parts of one batch take the step of clipping by hand on the whole of it."""
    options = ["--tiny", "--configs", CONFIG, "--ranks", 2, "-o", tmp_path]
    command = [sys.executable, str(BENCHMARKS / "rivals.py"), *map(str, options)]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stderr
    rows = json.loads((tmp_path / "rivals.json").read_text())["rows"]
    sharded = {row["mode"]: row for row in rows if row["library"] == "FSDP2 on 2 ranks"}
    assert list(sharded) == ["vanilla", "ghost_fsdp", "flash_clip"]
    for mode in ("ghost_fsdp", "flash_clip"):
        assert sharded[mode]["exactness"]["error"] <= 1e-10
        assert sharded[mode]["exactness"]["parameters"] == len(small_config().build().state_dict())
        assert sharded[mode]["time_ratio"] > 0
    assert "| ghost_fsdp, FSDP2 on 2 ranks |" in (tmp_path / "rivals.md").read_text()


def test_a_mode_that_does_not_clip_is_not_exact(check: ModuleType) -> None:
    small = small_config()
    found = check.exactness("vanilla", small, torch.device("cpu"))
    assert found["wrong"] == found["parameters"]
    assert found["error"] > 0.01
    assert check.exactness("flash_clip", small, torch.device("cpu"))["wrong"] == 0


def test_by_hand_as_the_tests_do_it(check: ModuleType) -> None:
    from tests.integration.clipping_by_hand import by_hand

    config = small_config()
    torch.manual_seed(0)
    model = config.build().double()
    x, y = config.inputs(torch.device("cpu"))

    def losses(module: Any, batch: Any) -> torch.Tensor:
        logits = module(batch["x"])
        return torch.nn.functional.cross_entropy(logits.movedim(-1, 1), batch["y"], reduction="none").mean(1)

    norms, total = by_hand(model, {"x": x, "y": y}, losses, 0.3)
    found_norms, found = check.gradients_by_hand(model, x, y, 0.3)
    assert found_norms == pytest.approx(norms, rel=1e-12)
    for name, expected in total.items():
        torch.testing.assert_close(found[name], expected / len(x), rtol=1e-10, atol=1e-15)


def test_out_of_memory_is_said(check: ModuleType) -> None:
    import rivals_report

    row = {"config": "c", "library": "fastDP", "mode": "fastDP ghost", "exactness": None}
    row["failed"] = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    results = {"machine": {"device": "H200"}, "versions": {}, "tiny": False, "papers": {"c": "nobody"}, "rows": [row]}
    written = rivals_report.markdown(results | {"published": []})
    assert "| fastDP ghost | out of memory | - | - | - | - | - |" in written


def test_refusals(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import rivals

    for arguments, sentence in (
        (["--configs", "resnet9000"], "no configuration resnet9000; there are gpt2_e2e_T100_B32_fp32, "),
        (["--fastdp", str(tmp_path)], f"{tmp_path} has no package fastDP: give the root of a checkout of fastDP"),
    ):
        monkeypatch.setattr(sys, "argv", ["rivals.py", *arguments])
        with pytest.raises(SystemExit) as exited:
            rivals.main()
        assert exited.value.code == 2
        assert sentence in capsys.readouterr().err


def test_what_came_before_the_time_was_over_counts(check: ModuleType) -> None:
    import clipping

    waits = "import time; print('{\"round\": 0}', flush=True); time.sleep(60)"
    seconds = -29.0  # a worker may take twice this, and a minute for its start
    assert clipping.run_worker([sys.executable, "-c", waits], seconds) == ([{"round": 0}], "its time was over")
    raises = "print('noise'); raise ValueError('of this')"
    lines, failed = clipping.run_worker([sys.executable, "-c", raises], 0)
    assert (lines, failed) == ([], "the worker ended with status 1: ValueError: of this")
