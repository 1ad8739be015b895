# SPDX-License-Identifier: Apache-2.0
"""After a run out of memory, following the report's first suggestion makes the run fit.

The predicted peak is within 10 % of the measured one. `pytest -s` shows the table.
"""

import fcntl
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from opacus_memprof import virtual_gpu
from opacus_memprof.profiles.units import format_bytes
from opacus_memprof.pytest_plugin.clean_session import empty_caches
from tests.planted_oom import FLASH_CLIP_PLANS, PLANS, Changes, Plan, train

_PATIENCE = 600  # seconds
_ROW = "{:42.42} {:>11} {:>11} {:50.50} {:>11} {:>11} {:>7} {}"


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    rows = [_ROW.format("case", "needs", "had", "first suggestion", "predicted", "measured", "error", "fits")]
    yield rows
    print("\n" + "\n".join(rows))


@pytest.fixture(autouse=True)
def gpu_alone() -> Iterator[None]:
    """Waits until no other process holds much of the GPU: what they hold would be part of the report, and of what fits.

    One process at a time runs these tests, which would wait for one another.
    """
    if virtual_gpu.active() is not None:  # nobody else sees it
        yield
        return
    lock = Path(tempfile.gettempdir()) / f"opacus-memprof-{torch.cuda.get_device_properties(0).uuid}.lock"
    with open(lock, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = time.monotonic() + _PATIENCE
        while (others := _of_others()) > 0.1 * torch.cuda.get_device_properties(0).total_memory:
            if time.monotonic() > end:
                pytest.skip(f"other processes hold {format_bytes(others)} of the GPU")
            time.sleep(1)
        yield
        empty_caches()  # the next process would wait for it


def _of_others() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_the_first_suggestion_makes_it_fit(plan: Plan, tmp_path: Path, table: list[str]) -> None:
    if plan.quirk == "crowd" and virtual_gpu.active() is not None:
        pytest.skip("no process sees another one's virtual GPU")
    needs = train(plan, "cuda", tmp_path / "needs")
    assert needs.error is None
    had = int(needs.peak * plan.limit)
    failed = train(plan, "cuda", tmp_path / "failed", had)
    assert isinstance(failed.error, torch.OutOfMemoryError)
    assert failed.report is not None
    first = failed.report["suggestions"][0]
    followed = train(plan, "cuda", tmp_path / "followed", had, Changes.from_actions(first["actions"]))
    predicted, error = first["predicted_peak_bytes"], first["predicted_peak_bytes"] / followed.peak - 1
    sizes = [format_bytes(size) for size in (needs.peak, had)]
    measured = [format_bytes(size) for size in (predicted, followed.peak)]
    fits = "yes" if followed.error is None else f"no: {str(followed.error).splitlines()[0][:80]}"
    table.append(_ROW.format(plan.name, *sizes, first["title"], *measured, f"{100 * error:+.1f} %", fits))
    others = [
        f"{suggestion['title'][:40]} {format_bytes(suggestion['predicted_peak_bytes'])} {suggestion['fits']}"
        for suggestion in failed.report["suggestions"][1:5]
    ]
    request, room = failed.report["request"], failed.report["room"]
    table.append(
        f"    failed: {request['phase']} of {request['module'] or '-'}, {request['category']}, step {request['step']}; "
        f"needed {format_bytes(failed.report['needed']['bytes'])} ({failed.report['needed']['phase']} of "
        f"{failed.report['needed']['module'] or '-'}); capacity {format_bytes(room['capacity_bytes'])}, cached "
        f"{format_bytes(room['cached_bytes'])}; then: {' | '.join(others)}; peaked in {followed.phase}"
    )
    assert followed.error is None
    assert abs(error) <= 0.1


@pytest.mark.parametrize("plan", FLASH_CLIP_PLANS, ids=str)
def test_what_flash_clip_would_take(plan: Plan, tmp_path: Path) -> None:
    """Whatever is suggested first: at most 3 % less than what is then measured, for a run that trusts it must fit."""
    needs = train(plan, "cuda", tmp_path / "needs")
    failed = train(plan, "cuda", tmp_path / "failed", int(needs.peak * plan.limit))
    assert failed.report is not None
    flash_clip = {"kind": "grad_sample_mode", "value": "flash_clip"}
    (predicted,) = (
        suggestion["predicted_peak_bytes"]
        for suggestion in failed.report["suggestions"]
        if suggestion["actions"] == [flash_clip]
    )
    measured = train(plan, "cuda", tmp_path / "followed", changes=Changes(mode="flash_clip")).peak
    assert 0.97 * measured <= predicted <= 1.15 * measured
