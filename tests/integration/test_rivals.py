# SPDX-License-Identifier: Apache-2.0
"""The comparison with rivals runs on the CPU, says who clips exactly, and gives rivals that fail a row."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from opacus_memprof.virtual_gpu.requirements import LIBRARIES

STATUS_1 = "the worker ended with status 1"
CONFIG = "gpt2_T4096_B1_bf16"
OWN = ["hooks", "functorch", "ghost", "flash_clip"]


@pytest.fixture
def check() -> ModuleType:
    """What says who clips exactly."""
    from benchmarks.clipping import rivals_exactness

    return rivals_exactness  # type: ignore[no-any-return]


def small_config() -> Any:
    from benchmarks.clipping import rivals_models

    return next(config.small for config in rivals_models.CONFIGS if config.name == CONFIG)


def fake_checkout(path: Path, package: str, source: str) -> Path:
    (path / package).mkdir(parents=True)
    (path / package / "__init__.py").write_text(source)
    return path


@pytest.mark.nightly
def test_the_small_copies_on_the_cpu(tmp_path: Path) -> None:
    engine = "class PrivacyEngine:\n    def __init__(self, *args, **kwargs): raise ValueError('no such layer | here')\n"
    fastdp = fake_checkout(tmp_path / "a", "fastDP", engine)
    flashnorm = fake_checkout(tmp_path / "b", "opacus", "raise SystemExit('this fork is broken')\n")
    options = ["--tiny", "--configs", CONFIG, "--fastdp", fastdp, "--flashnorm", flashnorm, "-o", tmp_path / "out"]
    command = [sys.executable, "-m", "benchmarks.clipping.rivals", *map(str, options)]
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
        assert row["failed"] == f"{STATUS_1}: this fork is broken"
    written = (tmp_path / "out/rivals.md").read_text()
    assert "| ValueError: no such layer / here | - | - | - |" in written
    assert (tmp_path / "out/rivals.png").stat().st_size > 10_000
    assert (tmp_path / "out/rivals-dark.png").stat().st_size > 10_000


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_models_that_fsdp_shards(check: ModuleType, tmp_path: Path, ranks: int) -> None:
    """Processes with parts of one batch take the step of clipping by hand on the whole of it.

    What does not clip is not measured.
    """
    engine = "class PrivacyEngine:\n    def __init__(self, *args, **kwargs): raise ValueError('no shards')\n"
    fastdp = fake_checkout(tmp_path / "a", "fastDP", engine)
    options = ["--tiny", "--ranks", ranks, "--fastdp", fastdp, "-o", tmp_path / "out"]
    command = [sys.executable, "-m", "benchmarks.clipping.rivals", *map(str, options)]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stderr
    rows = json.loads((tmp_path / "out/rivals.json").read_text())["rows"]
    library = {1: "FSDP2 on 1 rank", 2: "FSDP2 on 2 ranks"}[ranks]
    assert {row["library"] for row in rows} == {library}
    by_config = {row["config"]: {r["mode"]: r for r in rows if r["config"] == row["config"]} for row in rows}
    assert list(by_config) == ["llama_8b_lora_T4096_B1_bf16", "llama_8b_full_T4096_B1_bf16"]
    trained = [2 * 2 * 7, 2 * 9 + 3]  # adapters of two blocks; or weights of blocks, of the embedding, norm and head
    for modes, count in zip(by_config.values(), trained, strict=True):
        assert list(modes) == ["vanilla", "ghost_fsdp", "flash_clip", "fastDP MixOpt"]
        for mode in ("ghost_fsdp", "flash_clip"):
            found = modes[mode]["exactness"]
            assert found["error"] <= 1e-6  # transformers' normalization layers compute in float32
            assert (found["wrong"], found["parameters"]) == (0, count)
            assert modes[mode]["time_ratio"] > 0
        assert modes["fastDP MixOpt"]["failed"] == "ValueError: no shards", ran.stderr
    assert f"| ghost_fsdp, {library} |" in (tmp_path / "out/rivals.md").read_text()


@pytest.mark.nightly
@pytest.mark.skipif(
    not (LIBRARIES / "libcuda.so.1").is_file(), reason="the virtual GPU's libraries have not been built"
)
@pytest.mark.parametrize("config", ["llama_8b_lora_T4096_B1_bf16", "llama_8b_full_T4096_B1_bf16"])
def test_what_a_rank_of_two_takes_on_a_virtual_gpu(tmp_path: Path, config: str) -> None:
    """A rank has half of the parameters before a step, and flash_clip's peak is that without privacy.

    flash_clip keeps a layer's gradient, which autograd forms as well, and adapters' gradients are small.
    """
    command = [sys.executable, "-m", "opacus_memprof", "run", "--virtual-gpu", "h200", "--virtual-ranks", "2"]
    command += ["-o", str(tmp_path), "-m", "benchmarks.clipping.rivals_worker", config]
    command += ["--modes", "vanilla", "flash_clip", "--rounds", "1", "--no-check"]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stderr
    found = {line["mode"]: line for line in map(json.loads, re.findall(r"^{.*}$", ran.stdout, re.MULTILINE))}
    width, inner, values, layers, vocabulary = 4096, 14336, 1024, 32, 128256
    block = 2 * width * width + 2 * width * values + 3 * width * inner + 2 * width
    parameters = layers * block + 2 * vocabulary * width + width
    adapters = layers * 16 * (2 * 2 * width + 2 * (width + values) + 3 * (width + inner)) if "lora" in config else 0
    shards = 2 * (parameters + adapters) // 2  # of bfloat16, over two ranks
    assert found["vanilla"]["before_bytes"] == pytest.approx(shards, rel=1e-3)
    states = 2 * 2 * (adapters or parameters) // 2
    logits = 2 * 4096 * vocabulary
    assert found["vanilla"]["peak_bytes"] > shards + states + 2 * logits
    assert abs(found["flash_clip"]["peak_bytes"] - found["vanilla"]["peak_bytes"]) <= 33 << 20  # a cuBLAS workspace


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
    from benchmarks.clipping import rivals_report

    row = {"config": "c", "library": "fastDP", "mode": "fastDP ghost", "exactness": None}
    row["failed"] = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    results = {"machine": {"device": "H200"}, "versions": {}, "tiny": False, "papers": {"c": "nobody"}, "rows": [row]}
    by_others = {"config": "c", "mode": "fastDP ghost", "time_ratio": 2.534, "peak_ratio": None, "source": "a paper"}
    for published, cell in (([], "-"), ([by_others], "2.53 x (a paper)")):
        written = rivals_report.markdown(results | {"published": published})
        assert f"| fastDP ghost | out of memory | - | - | - | - | {cell} |" in written


def test_refusals(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.clipping import rivals

    fork = fake_checkout(tmp_path / "fork", "opacus", "")
    for arguments, sentence in (
        (["--configs", "resnet9000"], "no configuration resnet9000; there are gpt2_e2e_T100_B100_fp32, "),
        (["--configs", CONFIG, "--ranks", "2"], f"no configuration {CONFIG}; there are llama_8b_lora_T4096_B1_bf16, "),
        (["--ranks", "0"], "--ranks is 0: give the number of GPUs to shard over, at least 1"),
        (["--flashnorm", str(fork), "--ranks", "2"], "FlashNorm's modes know no shards: leave --flashnorm out"),
        (["--fastdp", str(tmp_path)], f"{tmp_path} has no package fastDP: give the root of a checkout of fastDP"),
    ):
        monkeypatch.setattr(sys, "argv", ["rivals.py", *arguments])
        with pytest.raises(SystemExit) as exited:
            rivals.main()
        assert exited.value.code == 2
        assert sentence in capsys.readouterr().err


def test_what_came_before_the_time_was_over_counts(check: ModuleType) -> None:
    from benchmarks.clipping import modes as clipping

    waits = "import time; print('{\"round\": 0}', flush=True); time.sleep(60)"
    seconds = -29.0  # a worker may take twice this, and a minute for its start
    seen: list[int] = []
    found = clipping.run_worker([sys.executable, "-c", waits], seconds, None, lambda lines: seen.append(len(lines)))
    assert found == ([{"round": 0}], "its time was over")
    assert seen == [1]
    raises = "print('noise'); raise ValueError('of this')"
    assert clipping.run_worker([sys.executable, "-c", raises], 0) == ([], f"{STATUS_1}: ValueError: of this")
    summary = "import sys; print('[rank1]: torch.Error: of this\\nFAILED\\n=====', file=sys.stderr); sys.exit(1)"
    found = clipping.run_worker([sys.executable, "-c", summary], 0)
    assert found == ([], f"{STATUS_1}: [rank1]: torch.Error: of this")
