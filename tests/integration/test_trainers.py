# SPDX-License-Identifier: Apache-2.0
"""The recipes in examples/trainers: plain, profiled, and on a virtual GPU."""

import ast
import contextlib
import io
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import opacus_memprof
from opacus_memprof.analysis.profile import load_profile

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "examples" / "trainers").glob("*.py"))

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks


def needs(recipe: Path) -> list[str]:
    """The packages that a recipe imports and this environment lacks."""
    tree = ast.parse(recipe.read_text(encoding="utf-8"))
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return sorted({name for module in modules if find_spec(name := module.partition(".")[0]) is None})


def losses(recipe: Path) -> list[str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(recipe), run_name="__main__")
    return [line for line in printed.getvalue().splitlines() if line.startswith("loss ")]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_trains_as_without_the_profiler(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing := needs(recipe):
        pytest.skip(f"{', '.join(missing)} is not installed")
    monkeypatch.chdir(tmp_path)
    assert len(recipe.read_text(encoding="utf-8").splitlines()) <= 60
    plain = losses(recipe)
    with opacus_memprof.profile("profile", device="cpu") as session:
        session.attach(opacus_memprof.PrivacyEngine)
        assert losses(recipe) == plain
    assert len(plain) > 2
    peak = session.result.devices["cpu"].peak
    assert sum(peak.categories.values()) == peak.requested_bytes
    assert peak.categories["unattributed"] < 0.05 * peak.requested_bytes


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_runs_on_a_virtual_gpu(recipe: Path, tmp_path: Path) -> None:
    if missing := needs(recipe):
        pytest.skip(f"{', '.join(missing)} is not installed")
    command = [sys.executable, "-m", "opacus_memprof", "run", "--virtual-gpu", "h200", "-o", "profile", str(recipe)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    peak = load_profile(tmp_path / "profile").devices["cuda:0"].peak
    assert sum(peak.categories.values()) == peak.requested_bytes
    assert peak.categories["model_parameters"] > 0
