# SPDX-License-Identifier: Apache-2.0
"""Opacus' own tests, which its wheel brings along: with the profiler on each ends as it does without.

`make test` runs a part of them with few of hypothesis' examples; `make opacus-suite` runs all of them as they are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

import opacus
import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = Path(opacus.__file__).parent / "tests"
PART = (
    "batch_memory_manager_test.py",
    "grad_sample_module_fast_gradient_clipping_test.py",
    "grad_sample_module_test.py",
    "grad_samples/conv1d_test.py",
    "grad_samples/dp_rnn_test.py",
    "grad_samples/embedding_test.py",
    "grad_samples/layer_norm_test.py",
    "grad_samples/linear_test.py",
    "gradient_accumulation_test.py",
    "per_sample_gradients_utils_test.py",
    "privacy_engine_test.py",
)
# Those take long, over the accountant or over variations of one model.
LEFT_OUT = "not with_epsilon and not Frozen and not TiedWeights and not deterministic_run"
ALL = os.environ.get("OPACUS_SUITE") == "all"

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(not TESTS.is_dir(), reason="this Opacus came without its tests")]


def outcomes(directory: Path, tests: Iterable[str], *options: str | Path) -> dict[str, str]:
    """Test → passed, failed, error or skipped."""
    directory.mkdir()
    report = directory / "report.xml"
    run = [TESTS] if ALL else [TESTS / test for test in tests]
    few = () if ALL else ("--examples", "2", "-k", LEFT_OUT)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.integration.opacus_suite", "-p", "no:cacheprovider",
               "--import-mode=importlib", "-o", "python_files=*_test.py", "-W", "ignore", "--tb=short",
               "--rootdir", TESTS, f"--junitxml={report}", *few, *options, *run]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(list(map(str, command)), cwd=directory, env=environment, capture_output=True, text=True)
    assert report.exists(), ran.stdout + ran.stderr
    (directory / "output.txt").write_text(ran.stdout + ran.stderr)
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        ends = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        found[f"{case.get('classname')}::{case.get('name')}"] = ends[0] if ends else "passed"
    return found


def node_id(name: str) -> str:
    """The test, as pytest takes it, of a name of `outcomes` such as grad_samples.linear_test.Linear_test::test_bias."""
    place, _, test = name.partition("::")
    module, _, suite = place.rpartition(".")
    return f"{module.replace('.', '/')}.py::{suite}::{test}"


def test_every_test_ends_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the profiler only tests run again that do not pass with it, unless all shall run."""
    profiled = outcomes(tmp_path / "profiled", PART, "--profile-into", tmp_path / "profile")
    compared = {name: outcome for name, outcome in profiled.items() if ALL or outcome != "passed"}
    plain = outcomes(tmp_path / "plain", map(node_id, compared)) if compared else {}
    if ALL:
        with capsys.disabled():
            print(f"\nwithout the profiler: {dict(Counter(plain.values()))}")
            print(f"with the profiler: {dict(Counter(profiled.values()))}")
    assert compared == plain, (tmp_path / "profiled" / "output.txt").read_text()
    assert Counter(profiled.values())["passed"] > (400 if ALL else 100)
    # It was on: it saw the tests' models, and every byte of them.
    profile = json.loads((tmp_path / "profile" / "profile.json").read_text())
    assert profile["status"] == "finished"
    assert profile["warnings"] == []
    assert profile["events"]["recorded"] > 10_000
    counts = profile["devices"]["cpu"]["snapshots"][-1]
    assert counts["remainder"] == 0
    assert len(profile["devices"]["cpu"]["steps"]) > 100
