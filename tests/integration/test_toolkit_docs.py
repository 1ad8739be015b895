# SPDX-License-Identifier: Apache-2.0
"""Every python block of docs/toolkit.md runs, and the document has today's thresholds."""

import re
from pathlib import Path

import pytest

import opacus_memprof
from opacus_memprof.toolkit import anomalies

pytest.importorskip("peft")  # before anything is recorded: its default arguments are tensors
DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "toolkit.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[f"block{index}" for index in range(len(BLOCKS))])
def test_a_block_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs/toolkit.md", "exec"), {})
    assert opacus_memprof.session.current() is None


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        (
            "leak",
            [
                anomalies.WARM_UP_READINGS,
                anomalies.LEAK_MB,
                anomalies.LEAK_RESIDENT_MB,
                anomalies.LEAK_ONCE,
                anomalies.WARM_UP_READINGS + anomalies.LEAK_READINGS,
                anomalies.LEAK_MONITOR_READINGS,
                anomalies.LEAK_WINDOW_SECONDS,
            ],
        ),
        ("sudden_growth", [anomalies.GROWTH_READINGS, anomalies.GROWTH_MB]),
        ("overuse", [100 * anomalies.OVERUSE_RATIO]),
        ("fragmentation", [100 * anomalies.FRAGMENTATION_RATIO, anomalies.FRAGMENTATION_MB]),
        ("large_parameter", [anomalies.LARGE_PARAMETER_MB, 100 * anomalies.LARGE_PARAMETER_RATIO]),
        ("gradient_anomaly", [anomalies.EXPLODING_GRADIENT]),
    ],
)
def test_the_thresholds_are_those_of_the_code(kind: str, numbers: list[float]) -> None:
    row = re.search(rf"^\| `{kind}` \| (.*) \|$", DOCUMENT, re.MULTILINE)
    assert row is not None
    assert [float(number) for number in re.findall(r"\d+", row[1])] == numbers
