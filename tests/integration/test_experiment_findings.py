# SPDX-License-Identifier: Apache-2.0
"""The findings of a run: in its result, and in its profile."""

import json
import re
from pathlib import Path

import pytest

from opacus_memprof.experiments import training
from opacus_memprof.experiments.configuration import Configuration
from opacus_memprof.profiles.units import parse_size

MB = 2**20


def test_findings_count_in_the_unit_of_the_result(tmp_path: Path) -> None:
    """Sentence by sentence the sizes of the profile's findings, which have the unit that suits each."""
    chosen = Configuration(mode="hooks", seq_length=64, batch_size=4, num_steps=2, warmup_steps=1, device="cpu")
    result = training.train(chosen, tmp_path / "profile")
    profile = json.loads((tmp_path / "profile" / "profile.json").read_text(encoding="utf-8"))
    assert [finding.kind for finding in result.findings] == [finding["kind"] for finding in profile["findings"]] != []
    size = re.compile(r"([\d.]+) ([KMG]iB|MB)\b")
    for finding, written in zip(result.findings, profile["findings"], strict=True):
        assert size.split(finding.evidence)[::3] == size.split(written["evidence"])[::3]
        found, sizes = size.findall(finding.evidence), size.findall(written["evidence"])
        assert {unit for _, unit in found} == {"MB"}
        for (value, _), (other, unit) in zip(found, sizes, strict=True):
            assert float(value) * MB == pytest.approx(parse_size(f"{other} {unit}"), abs=0.011 * MB)
