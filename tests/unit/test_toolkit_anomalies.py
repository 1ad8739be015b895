# SPDX-License-Identifier: Apache-2.0
"""What the toolkit calls an anomaly: planted ones are found and named, ordinary runs raise none."""

import random
from datetime import datetime, timedelta
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from opacus_memprof.toolkit import anomalies
from opacus_memprof.toolkit.readings import MEMORY_STATS, RECORDER, RESIDENT
from opacus_memprof.toolkit.snapshots import format_findings

GPU_MB = 10_000.0
START = datetime(2024, 1, 15, 10, 30)


def snapshot(
    allocated: float,
    name: str = "step",
    *,
    source: str = RECORDER,
    peak: float | None = None,
    reserved: float | None = None,
    total: float | None = GPU_MB,
    seconds: float = 0.0,
) -> dict[str, Any]:
    most = allocated if peak is None else peak
    reading = {
        "device": "cuda:0",
        "source": source,
        "allocated_mb": allocated,
        "reserved_mb": allocated if reserved is None else reserved,
        "max_allocated_mb": most,
        "max_reserved_mb": most if reserved is None else reserved,
        "total_mb": total,
        "utilization_percent": None if total is None else 100 * allocated / total,
        "categories_mb": {},
    }
    return {"name": name, "timestamp": (START + timedelta(seconds=seconds)).isoformat(), "devices": [reading]}


def kinds(findings: list[dict[str, Any]]) -> list[str]:
    return [finding["kind"] for finding in findings]


def series(sizes: list[float], interval: float = 1.0, **options: Any) -> list[dict[str, Any]]:
    """The findings in readings that are `interval` seconds apart."""
    return anomalies.find_in_history(
        [snapshot(size, seconds=interval * index, **options) for index, size in enumerate(sizes)]
    )


def test_steady_growth_is_a_leak_of_its_size() -> None:
    [leak] = series([100.0, 150.0, *(150.0 + 2 * step for step in range(16))])
    assert leak["kind"] == "leak"
    assert leak["bytes"] == 28 * 2**20  # from the lowest of the first two to the lowest of the last two
    assert "from 150.0MB to 178.0MB" in leak["evidence"]
    assert "+2.00MB each" in leak["evidence"]
    assert leak["remedy"]


def test_a_leak_is_found_once_it_outgrows_the_noise() -> None:
    noise = random.Random(0)
    sizes = [500 + noise.uniform(-20, 20) + 1.0 * step for step in range(400)]
    assert series(sizes[:30]) == []
    assert kinds(series(sizes)) == ["leak"]


@pytest.mark.parametrize(
    "sizes",
    [
        [0.0, 40.0, *([100.0] * 40)],  # warm-up
        [*([100.0] * 20), *([180.0] * 20)],  # a cache that grew once
        [100.0 + 0.05 * step for step in range(18)],  # less than a MB
        [*(100.0 + step for step in range(17))],  # too few to tell
        [200.0 - step for step in range(60)],
    ],
)
def test_other_changes_are_no_leak(sizes: list[float]) -> None:
    assert series(sizes) == []


def test_batches_of_varying_size_are_no_leak() -> None:
    """Poisson sampling: 300 runs of up to 60 steps, at two points of each step."""
    noise = random.Random(1)
    for _ in range(300):
        batches = [max(0.0, noise.gauss(64, 8)) for _ in range(noise.randrange(18, 60))]
        history = [snapshot(50 + batch, "forward") for batch in batches]
        history += [snapshot(50 + 3 * batch, "backward") for batch in batches]
        assert anomalies.find_in_history(history) == []


def test_a_leak_seen_at_several_points_is_one_finding() -> None:
    history = [snapshot(100 + step * (3 if name == "b" else 2), name) for step in range(20) for name in "ab"]
    [leak] = anomalies.find_in_history(history)
    assert 'of "b"' in leak["evidence"]


def test_points_of_a_step_are_not_compared_with_each_other() -> None:
    assert series([100.0, 900.0] * 20, name="at random") == []
    history = [snapshot(100.0 * position, f"stage {position}") for position in range(1, 40)]
    assert anomalies.find_in_history(history) == []


def test_resident_memory_may_creep() -> None:
    sizes = [500.0 + step for step in range(20)]
    assert series(sizes, source=RESIDENT) == []
    assert kinds(series(sizes, source=MEMORY_STATS)) == ["leak"]
    assert kinds(series([500.0 + 5 * step for step in range(20)], source=RESIDENT)) == ["leak"]


def test_readings_at_an_interval_need_more_of_them() -> None:
    sizes = [100.0 + 5 * step for step in range(30)]
    assert series(sizes, name=anomalies.MONITOR) == []
    assert kinds(series([100.0 + 5 * step for step in range(60)], name=anomalies.MONITOR)) == ["leak"]


def with_drift(sizes: list[float]) -> list[float]:
    """With what a running program and the readings themselves add."""
    return [size + 0.01 * index for index, size in enumerate(sizes)]


def test_one_large_allocation_is_no_leak_whatever_else_creeps() -> None:
    for before in range(2, 58):
        sizes = with_drift([500.0] * before + [1300.0] * (60 - before))
        for source in (RECORDER, MEMORY_STATS, RESIDENT):
            assert "leak" not in kinds(series(sizes, name=anomalies.MONITOR, source=source))
            assert "leak" not in kinds(series(sizes, source=source))


@pytest.mark.parametrize("filling", [0.4, 0.8, 1.5])
def test_an_allocation_that_is_being_filled_is_no_leak(filling: float) -> None:
    """800 MB read every 20 ms as resident memory, page by page over `filling` seconds, for 1 to 40 seconds."""
    for length in range(50, 2000, 50):
        for begins in (0, length // 3, length - 25):
            fills = [min(1.0, max(0.0, 0.02 * (index - begins) / filling)) for index in range(length)]
            sizes = with_drift([500 + 800 * full for full in fills])
            assert series(sizes, interval=0.02, name=anomalies.MONITOR, source=RESIDENT) == []


def test_a_leak_sampled_every_20_ms_is_found_in_time() -> None:
    options: dict[str, Any] = {"interval": 0.02, "name": anomalies.MONITOR}
    sizes = [500 + 0.5 * index for index in range(1000)]  # 20 seconds
    assert kinds(series(sizes, source=RESIDENT, **options)) == ["leak"]
    assert kinds(series(sizes[:60], source=RECORDER, **options)) == ["leak"]  # which knows what lives


def test_a_leak_beside_one_large_allocation_is_found() -> None:
    sizes = [100.0 + 2 * step + (800 if step > 10 else 0) for step in range(30)]
    assert kinds(series(sizes)) == ["leak", "sudden_growth"]


def grown(*readings: tuple[str, float], threshold: float = 200.0) -> list[tuple[str, int]]:
    """The growth between named snapshots: what its evidence says of their names, and MB."""
    found = anomalies.find_in_history([snapshot(size, name) for name, size in readings], growth_mb=threshold)
    assert all(finding["kind"] == "sudden_growth" for finding in found)
    return [(finding["evidence"].split("from ")[1].split(", to")[0], finding["bytes"] // 2**20) for finding in found]


def test_growth_between_checkpoints_is_held_against_the_threshold() -> None:
    assert grown(("start", 100.0), ("after", 700.0)) == [('"start" to "after"', 600)]
    assert grown(("start", 100.0), ("after", 300.0)) == []
    assert grown(("start", 100.0), ("after", 300.0), threshold=199.0) == [('"start" to "after"', 200)]
    assert grown(("a", 100.0), ("b", 250.0), ("c", 400.0)) == [('"a" to "c"', 300)]  # not at once
    assert grown(("a", 900.0), ("b", 100.0), ("c", 400.0)) == [('"b" to "c"', 300)]
    assert grown(("a", 0.0), ("b", 300.0), ("c", 310.0), ("d", 700.0)) == [('"a" to "b"', 300), ('"b" to "d"', 400)]


def test_points_are_compared_with_those_of_the_step_before() -> None:
    step = [("forward", 500.0), ("backward", 900.0), ("end", 100.0)]
    assert grown(("start", 450.0), *step, *step, *step) == [('"start" to "backward"', 450)]
    assert grown(*step[:1], *step[2:], *step[:1], ("end", 350.0)) == [('"end" to "end"', 250)]


def test_sudden_growth() -> None:
    [finding] = series([300.0] * 12 + [900.0])
    assert finding["kind"] == "sudden_growth"
    assert finding["bytes"] == 600 * 2**20
    assert "reading 13" in finding["evidence"]
    assert series([300.0] * 12 + [440.0]) == []  # less than half as much again
    assert series([10.0] * 12 + [100.0]) == []  # less than 200 MB
    assert kinds(anomalies.find_in_history([snapshot(10.0)] * 12 + [snapshot(100.0)], growth_mb=50.0)) == [
        "sudden_growth"
    ]
    assert series([300.0] * 3 + [900.0]) == []  # still setting up


def test_overuse_and_threshold() -> None:
    assert anomalies.find_in_snapshot(snapshot(0.89 * GPU_MB)) == []
    assert kinds(anomalies.find_in_snapshot(snapshot(0.9 * GPU_MB))) == ["overuse"]
    assert anomalies.find_in_snapshot(snapshot(1.0, total=None)) == []
    [finding] = anomalies.find_in_snapshot(snapshot(1456.7), threshold_mb=1000.0)
    assert finding["kind"] == "over_threshold"
    assert finding["evidence"] == "GPU 0 memory use exceeds the threshold: 1456.7MB > 1000.0MB"
    assert finding["bytes"] == round(456.7 * 2**20)


def test_fragmentation_is_what_was_never_in_use_at_once() -> None:
    [finding] = anomalies.find_in_snapshot(snapshot(500.0, peak=2000.0, reserved=3000.0))
    assert finding["kind"] == "fragmentation"
    assert finding["bytes"] == 1000 * 2**20
    assert "expandable_segments" in finding["remedy"]
    assert anomalies.find_in_snapshot(snapshot(0.0, peak=3000.0, reserved=3000.0)) == []  # only cached
    assert anomalies.find_in_snapshot(snapshot(10.0, peak=100.0, reserved=200.0)) == []  # small


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)


def trained() -> Model:
    torch.manual_seed(0)
    model = Model()
    model.head(model.body(torch.randn(3, 4))).sum().backward()
    return model


def test_a_clean_model_has_no_anomaly() -> None:
    assert anomalies.find_in_model(trained()) == []


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("inf"), "Inf"), (float("-inf"), "Inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_parameters_that_are_not_finite(value: float, word: str, dtype: torch.dtype) -> None:
    model = Model()
    weight = torch.zeros(4, 4)
    weight[2, 3] = value
    model.body.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
    [finding] = anomalies.find_in_model(model)
    assert (finding["kind"], finding["module"]) == ("nan_inf_parameter", "body.weight")
    assert (finding["severity"], finding["bytes"]) == ("error", 16 * dtype.itemsize)
    assert finding["evidence"] == f"parameter contains {word}: body.weight"


def test_parameters_without_numbers_are_passed_over() -> None:
    model = nn.Module()
    model.empty = nn.Parameter(torch.empty(0, 3))
    model.meta = nn.Parameter(torch.empty(3, device="meta"))
    model.index = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    model.complex = nn.Parameter(torch.tensor([1j, complex(0, float("nan"))]))
    assert [found["module"] for found in anomalies.find_in_model(model)] == ["complex"]


def test_gradients() -> None:
    model = trained()
    assert model.body.weight.grad is not None
    model.body.weight.grad[0, 0] = float("nan")
    assert model.body.bias.grad is not None
    model.body.bias.grad.fill_(2e4)
    model.head.weight.requires_grad_(False)
    found = {finding["module"]: finding for finding in anomalies.find_in_model(model)}
    assert set(found) == {"body.weight", "body.bias", "head.weight"}
    assert all(finding["kind"] == "gradient_anomaly" for finding in found.values())
    assert found["body.weight"]["evidence"] == "gradient contains NaN: body.weight"
    assert "norm 4e+04, entries of 2e+04" in found["body.bias"]["evidence"]  # four of them
    assert found["head.weight"]["bytes"] == 2 * 4 * 4


def test_a_sparse_gradient_is_looked_at() -> None:
    table = nn.Embedding(8, 4, sparse=True)
    table(torch.tensor([1, 1, 5])).sum().backward()
    assert anomalies.find_in_model(table) == []
    assert table.weight.grad is not None
    table.weight.grad *= float("inf")
    assert kinds(anomalies.find_in_model(table)) == ["gradient_anomaly"]


def test_a_parameter_that_is_large_for_its_model() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(1024, 25 * 1024 + 1, bias=False, device="meta")  # a row more than 100 MB
            self.body = nn.Linear(1024, 24 * 1024, bias=False, device="meta")  # 96 MB

    [finding] = anomalies.find_in_model(Large())
    assert (finding["kind"], finding["module"]) == ("large_parameter", "head.weight")
    assert finding["bytes"] == 100 * 2**20 + 4096
    many = nn.Sequential(*(nn.Linear(1024, 26 * 1024, bias=False, device="meta") for _ in range(11)))
    assert anomalies.find_in_model(many) == []  # 104 MB each, but none of them a tenth


def test_the_text_has_evidence_and_remedy() -> None:
    findings = anomalies.find_in_snapshot(snapshot(0.95 * GPU_MB))
    text = format_findings([*findings, *findings])
    assert text.count("remedy: ") == 1
    assert "95.0% full" in text
    assert format_findings([]) == "\nno anomalies\n"
    many = [replace(findings[0], evidence=f"number {number}.") for number in range(9)]
    assert all(f"number {number}." in format_findings(many) for number in range(9))
