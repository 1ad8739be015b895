# SPDX-License-Identifier: Apache-2.0
"""The recipes in examples/trainers: plain, profiled, and on a virtual GPU."""

import ast
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.profiles.profile import Peak
from tests import warm_python

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "examples" / "trainers").glob("*.py"))
GPU_ONLY = "with_deepspeed"  # compiles code of its own on a CPU
QUICK = "with_accelerate"
# test_frameworks.py trains with Lightning and transformers in every run.
TRIED = [pytest.param(recipe, marks=[pytest.mark.nightly] * (recipe.stem != QUICK)) for recipe in RECIPES]


def needs(recipe: Path) -> list[str]:
    """The packages that a recipe imports, also through transformers, and this environment lacks."""
    text = recipe.read_text(encoding="utf-8")
    tree = ast.parse(text)
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    modules += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    modules += ["bitsandbytes"] if "BitsAndBytesConfig" in text else []
    return sorted({name for module in modules if find_spec(name := module.partition(".")[0]) is None})


def losses(command: list[str], recipe: Path, directory: Path) -> list[str]:
    environment = warm_python.ENVIRONMENT | {"HF_HUB_OFFLINE": "1"}
    ran = subprocess.run([*command, str(recipe)], cwd=directory, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return [line for line in ran.stdout.splitlines() if line.startswith("loss ")]


def check(peak: Peak) -> None:
    assert sum(peak.categories.values()) == peak.requested_bytes
    assert peak.categories.get("unattributed", 0) < 0.05 * peak.requested_bytes


@pytest.mark.slow
@pytest.mark.parametrize("recipe", TRIED, ids=lambda recipe: recipe.stem)
def test_a_recipe_trains_as_without_the_profiler(recipe: Path, tmp_path: Path) -> None:
    assert len(recipe.read_text(encoding="utf-8").splitlines()) <= 60
    if missing := needs(recipe):
        pytest.skip(f"{', '.join(missing)} is not installed")
    if recipe.stem == GPU_ONLY:
        pytest.skip("compiles code of its own on a CPU")
    python = warm_python.interpreter()
    plain = losses(python, recipe, tmp_path)
    profiled = losses([*python, "-m", "opacus_memprof", "run", "-o", "profile"], recipe, tmp_path)
    assert len(plain) > 2
    assert profiled == plain
    profile = load_profile(tmp_path / "profile")
    check(profile.devices["cpu"].peak)
    assert len(profile.devices["cpu"].peak.modules) > 2
    assert any(step.complete for step in profile.devices["cpu"].steps)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", TRIED, ids=lambda recipe: recipe.stem)
def test_a_recipe_runs_on_a_virtual_gpu(recipe: Path, tmp_path: Path) -> None:
    if missing := needs(recipe):
        pytest.skip(f"{', '.join(missing)} is not installed")
    command = [*warm_python.interpreter(), "-m", "opacus_memprof", "run", "--virtual-gpu", "h200", "-o", "profile"]
    assert len(losses(command, recipe, tmp_path)) > 2
    check(load_profile(tmp_path / "profile").devices["cuda:0"].peak)
