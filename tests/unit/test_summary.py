# SPDX-License-Identifier: Apache-2.0
"""The first screen of a profile: verdict, what would change it, what was held."""

import io
import os
from pathlib import Path
from typing import Any

import pytest
from made_plans import a_run
from made_profiles import a_device, a_peak, a_profile
from rich.console import Console

from opacus_memprof.analysis.oom.failure_report import build_report
from opacus_memprof.analysis.profile_view import view_profile
from opacus_memprof.language import in_language
from opacus_memprof.profiles.json_object import to_json
from opacus_memprof.profiles.layer_shapes import TrainingShapes
from opacus_memprof.profiles.oom_report import OomReport, SuggestedChange
from opacus_memprof.profiles.plan import Plan, PlanVerdict, TriedAdvice, add_trials
from opacus_memprof.profiles.profile import Finding, NameLists, Profile
from opacus_memprof.reports.oom import print_oom
from opacus_memprof.reports.summary import ModuleRow, fold_modules, print_failure, print_summary

MIB = 2**20


def lines(print_screen: Any, shown: Any, width: int = 80) -> list[str]:
    stream = io.StringIO()
    print_screen(shown, Console(file=stream, width=width, color_system=None))
    return stream.getvalue().splitlines()


def private_profile(**more: Any) -> Profile:
    """A peak of 20 MiB. Privacy's are 12 MiB of per-sample gradients and 1 MiB of captures that only Opacus holds."""
    peak = a_peak(
        requested_bytes=20 * MIB,
        step=1,
        phase="backward",
        categories={"per_sample_gradients": 12 * MIB, "activation_hooks": 3 * MIB, "model_parameters": 5 * MIB},
        activation_hooks={"shared_with_autograd": 2 * MIB, "opacus_only": MIB},
        modules={f"blocks.{i}.mlp": {"per_sample_gradients": 4 * MIB} for i in range(3)},
    )
    return a_profile(**{"devices": {"cpu": a_device(peak=peak)}, **more})


def out_of_memory(*suggestions: SuggestedChange) -> OomReport:
    holding = {
        "bytes": 900 * MIB,
        "blocks": 3,
        "largest": 300 * MIB,
        "category": "activations",
        "module": "blocks.0.attention",
        "op": "",
        "phase": "forward",
        "step": 0,
    }
    failure = {
        "number": 0,
        "device": "cpu",
        "requested": 12 * MIB,
        "category": "per_sample_gradients",
        "module": "head",
        "op": "",
        "phase": "backward",
        "step": 0,
        "logical_step": 0,
        "unix_ns": 0,
        "holdings": [holding],
        "upstream": {"limit": 905 * MIB},
    }
    report = build_report([failure], TrainingShapes())
    report.suggestions[:] = suggestions
    return report


def a_change(title: str, peak: int, fits: bool, code: str = "") -> SuggestedChange:
    return SuggestedChange(title, [], code, "", peak, 0, fits)


def test_the_peak_is_said_first() -> None:
    head = lines(print_summary, view_profile(private_profile()))
    assert head[0].endswith("finished, exit code 0")
    assert head[1] == "PEAK 20.00 MiB in backward of step 1, on cpu"


def test_of_many_categories_the_largest_five_are_named() -> None:
    sizes = {f"category{n}": (9 - n) * MIB for n in range(7)}
    device = a_device(peak=a_peak(requested_bytes=42 * MIB, categories=sizes))
    shown = lines(print_summary, view_profile(a_profile(devices={"cpu": device})))
    begin = next(i for i, line in enumerate(shown) if line.startswith("AT THE PEAK"))
    assert [line.split()[0] for line in shown[begin + 1 : begin + 6]] == [f"category{n}" for n in range(5)]
    assert shown[begin + 6].startswith("2 more")
    assert "7.00 MiB" in shown[begin + 6]


def test_what_privacy_costs_leaves_out_what_autograd_holds() -> None:
    text = "\n".join(lines(print_summary, view_profile(private_profile()), 140))
    assert "WHAT PRIVACY COSTS 13.00 MiB of it, 65.0 %: per_sample_gradients 12.00 MiB" in text  # 12 + 1 of 20


def test_per_sample_gradients_lead_to_flash_clip() -> None:
    text = "\n".join(lines(print_summary, view_profile(private_profile()), 140))
    assert 'COULD BE up to 12.00 MiB less with grad_sample_mode="flash_clip"' in text


def test_predicted_changes_stand_before_the_tables() -> None:
    """The lowest peak first, with what it saves, and the first change's code as a whole."""
    code = 'opacus_memprof.PrivacyEngine().make_private(..., grad_sample_mode="flash_clip")  # a line of 90 characters'
    improvements = [
        {"title": 'grad_sample_mode="flash_clip"', "predicted_peak_bytes": 8 * MIB, "code": code, "needs_edit": False},
        {"title": "checkpoints", "predicted_peak_bytes": 15 * MIB, "code": "checkpoint(block)", "needs_edit": True},
    ]
    profile = private_profile()
    device = a_device(
        peak=profile.devices["cpu"].peak, improvements=[{**each, "computed": ""} for each in improvements]
    )
    shown = lines(print_summary, view_profile(a_profile(devices={"cpu": device})))
    heading = next(i for i, line in enumerate(shown) if "COULD BE" in line)
    assert shown[heading + 1].split() == ["1", 'grad_sample_mode="flash_clip"', "8.00", "MiB", "-60", "%", "predicted"]
    assert shown[heading + 2].split() == ["2", "checkpoints", "15.00", "MiB", "-25", "%", "needs", "an", "edit"]
    assert shown[heading + 3] == f"   {code}"
    assert heading + 3 < next(i for i, line in enumerate(shown) if line.startswith("AT THE PEAK"))
    assert "up to" not in "\n".join(shown)


def test_each_module_of_a_row_has_at_most_the_largest_where_they_differ() -> None:
    modules = {f"conv.{i}": {"per_sample_gradients": size * MIB} for i, size in enumerate((74, 8, 2))}
    modules |= {f"block.{i}": {"per_sample_gradients": 6 * MIB} for i in range(2)}
    peak = a_peak(requested_bytes=96 * MIB, step=1, phase="clip", modules=modules)
    printed = lines(print_summary, view_profile(a_profile(devices={"cpu": a_device(peak=peak)})))
    rows = [" ".join(line.split()) for line in printed]
    assert "conv.[0-2] ×3 ≤ 74.00 MiB 84.00 MiB" in rows  # noqa: RUF001
    assert "block.[0-1] ×2 6.00 MiB 12.00 MiB" in rows  # noqa: RUF001


def test_the_largest_reserved_memory_is_printed_beside_the_peak() -> None:
    def line(**reserved: Any) -> str:
        device = a_device(peak=a_peak(requested_bytes=MIB, step=1, phase="clip"), reserved_peak=reserved)
        return lines(print_summary, view_profile(a_profile(devices={"cuda:0": device})))[2]

    assert line(bytes=3 * MIB, step=0, phase="forward") == "LARGEST RESERVED 3.00 MiB in forward of step 0"
    assert line(bytes=3 * MIB, step=1, phase="clip") == "LARGEST RESERVED 3.00 MiB"


def test_unattributed_memory_is_listed_by_line() -> None:
    stacks = {
        "train.py:41 in update < train.py:60 in main": {"unattributed": 5 * MIB},
        "train.py:41 in update < train.py:72 in main": {"unattributed": 3 * MIB, "inputs": MIB},
        "train.py:7": {"unattributed": MIB},
        "train.py:8": {"unattributed": 100},
    }
    for total, shown in ((10 * MIB, True), (MIB, False)):  # of 20 MiB
        peak = a_peak(
            requested_bytes=20 * MIB,
            categories={"unattributed": total, "inputs": 20 * MIB - total},
            lines=stacks if shown else {"train.py:7": {"unattributed": total}},
        )
        screen = lines(print_summary, view_profile(a_profile(devices={"cpu": a_device(peak=peak)})))
        heading = [number for number, line in enumerate(screen) if line.startswith("UNATTRIBUTED, BY LINE")]
        assert bool(heading) == shown
        for number in heading:
            assert [line.split() for line in screen[number + 1 : number + 5]] == [
                ["train.py:41", "in", "update", "8.00", "MiB", "40.0", "%"],
                ["train.py:7", "1.00", "MiB", "5.0", "%"],
                ["elsewhere", "1.00", "MiB", "5.0", "%"],
                [],
            ]


def test_a_failure_lists_unattributed_memory_by_line() -> None:
    op = "train.py:41 in update < train.py:60 in main"
    holding = {"bytes": 900 * MIB, "blocks": 3, "largest": 300 * MIB, "category": "unattributed", "module": ""}
    failure = {
        "number": 0,
        "device": "cpu",
        "requested": 12 * MIB,
        "category": "unattributed",
        "module": "",
        "op": "",
        "phase": "idle",
        "step": 0,
        "logical_step": 0,
        "unix_ns": 0,
        "holdings": [{**holding, "op": op, "phase": "idle", "step": 0}],
        "upstream": {"limit": 905 * MIB},
    }
    names = NameLists(ops=["", op], lines=["", "train.py:41 in update"])
    report = build_report([failure], TrainingShapes(), names=names)
    assert report.holders.unattributed == {"train.py:41 in update": 900 * MIB}
    screen = lines(print_failure, report)
    assert any(line.startswith("UNATTRIBUTED, BY LINE") for line in screen)
    assert any(line.split()[:3] == ["train.py:41", "in", "update"] for line in screen)


def test_a_run_without_privacy_has_no_costs() -> None:
    peak = a_peak(requested_bytes=MIB, categories={"activations": MIB})
    text = "\n".join(lines(print_summary, view_profile(a_profile(devices={"cpu": a_device(peak=peak)}))))
    assert "PRIVACY" not in text
    assert "COULD BE" not in text


def test_remedies_stand_above_the_tables() -> None:
    finding = {"kind": "growing_memory", "module": "", "bytes": MIB, "evidence": "why", "remedy": "call zero_grad()"}
    text = "\n".join(lines(print_summary, view_profile(private_profile(findings=[finding]))))
    assert text.index("growing memory, 1.00 MiB") < text.index("call zero_grad()") < text.index("AT THE PEAK")


def test_defects_stand_above_the_verdict_with_what_was_observed() -> None:
    waste = {"kind": "ghost_matrices", "module": "", "bytes": MIB, "evidence": "large", "remedy": "use hooks"}
    defect = {
        "kind": "different_numbers_of_samples",
        "module": "wpe",
        "bytes": 0,
        "evidence": "wpe has 1",
        "remedy": "expand",
    }
    text = "\n".join(lines(print_summary, view_profile(private_profile(findings=[waste, defect], status="failed"))))
    order = ["different numbers of samples in wpe", "wpe has 1", "FIX  expand", "PEAK", "ghost matrices", "use hooks"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert "large" not in text


def test_a_failure_is_verdict_fix_evidence() -> None:
    shown = lines(print_failure, out_of_memory(a_change("half the batch", 400 * MIB, True)))
    assert shown[:2] == [
        "OUT OF MEMORY in backward of step 0, cpu",
        "12.00 MiB of per sample gradients of head failed",
    ]
    fix = next(i for i, line in enumerate(shown) if "FIX" in line)
    held = next(i for i, line in enumerate(shown) if line.startswith("HELD AT THE FAILURE"))
    assert 1 < fix < held
    assert shown[fix + 1].split() == ["1", "half", "the", "batch", "400.00", "MiB", "fits", "predicted"]


def test_a_failure_takes_one_screen() -> None:
    changes = [a_change(f"a change with a long title, number {i}", i * MIB, i < 2, "x = 1\ny = 2") for i in range(9)]
    shown = lines(print_failure, out_of_memory(*changes))
    assert len(shown) <= 24
    assert max(map(len, shown)) <= 80


def test_code_to_copy_is_one_line() -> None:
    code = "with BatchMemoryManager(data_loader=loader, max_physical_batch_size=6, optimizer=optimizer) as loader:"
    shown = lines(print_failure, out_of_memory(a_change("half the batch", MIB, True, code)))
    assert f"   {code}" in shown


def planned_report(script: Path) -> OomReport:
    """Returns a report whose suggestions a plan beside the script has tried, except the first."""
    plan = Plan(
        program=str(script),
        arguments=["--lr", "0.1"],
        ranks=1,
        verdict=PlanVerdict(
            gpu="t4",
            memory_bytes=None,
            fits=False,
            needed_bytes=1200 * MIB,
            spare_bytes=-200 * MIB,
            predicted_gpu=None,
            run=a_run(8, fits=False),
            with_more_memory=None,
            advice=[
                TriedAdvice(
                    title="fails", code="x = 1", predicted_peak_bytes=300 * MIB, tried=None, failure="ValueError: no"
                ),
                TriedAdvice(
                    title="too large",
                    code="x = 1",
                    predicted_peak_bytes=300 * MIB,
                    tried=a_run(8, fits=False),
                    failure="",
                ),
                TriedAdvice(title="works", code="x = 1", predicted_peak_bytes=300 * MIB, tried=a_run(1), failure=""),
                TriedAdvice(
                    title="needs an edit", code="x = 1", predicted_peak_bytes=300 * MIB, tried=None, failure=""
                ),
            ],
        ),
    )
    (script.parent / "plan.json").write_text(to_json(plan))
    titles = ["needs an edit", "fails", "too large", "works"]
    report = out_of_memory(*(a_change(title, 300 * MIB, True) for title in titles))
    report.room.device_bytes = 1000 * MIB
    report.plan = f"opacus-memprof plan --gpu t4 {script} --lr 0.1"
    return report


def test_what_a_plan_has_tried_is_said(tmp_path: Path) -> None:
    """What fits when tried is first, and what does not is last, whatever was predicted."""
    script = tmp_path / "train.py"
    script.write_text("")
    report = planned_report(script)
    add_trials(report, tmp_path)
    assert [each.title for each in report.suggestions] == ["works", "needs an edit", "fails", "too large"]
    rows = [line.split() for line in lines(print_failure, report) if line[:2] in ("1 ", "2 ", "3 ")]
    assert rows == [
        ["1", "works", "1.10", "GiB", "fits", "tried"],  # 1 GiB and a sample of 100 MiB
        ["2", "needs", "an", "edit", "0.29", "GiB", "fits", "predicted"],
        ["3", "fails", "0.29", "GiB", "fails", "tried"],
    ]
    assert "ValueError: no" in "\n".join(lines(print_failure, report))
    assert "tried: failed with ValueError: no" in "\n".join(lines(print_oom, report, 140))


@pytest.mark.parametrize("change", ["script", "arguments", "memory", "no plan"])
def test_a_plan_of_something_else_says_nothing(tmp_path: Path, change: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    report = planned_report(script)
    file = tmp_path / "plan.json"
    match change:
        case "script":  # edited since
            os.utime(script, (file.stat().st_mtime + 1, file.stat().st_mtime + 1))
        case "arguments":
            report.plan = f"opacus-memprof plan --gpu t4 {script}"
        case "memory":
            report.room.device_bytes = 2000 * MIB
        case "no plan":
            file.unlink()
    add_trials(report, tmp_path)
    assert [each.title for each in report.suggestions] == ["needs an edit", "fails", "too large", "works"]
    assert all(each.fits for each in report.suggestions)


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ({"h.0.mlp": 2, "h.1.mlp": 4, "h.2.mlp": 3}, [ModuleRow("h.[0-2].mlp", 3, 4, 9)]),
        ({"h.0": 1, "h.2": 1, "h.3": 1}, [ModuleRow("h.[0,2-3]", 3, 1, 3)]),
        ({"h.7.mlp.0": 5, "h.7.mlp.2": 0}, [ModuleRow("h.7.mlp.0", 1, 5, 5)]),
        ({"a1": 2, "a2": 3}, [ModuleRow("a2", 1, 3, 3), ModuleRow("a1", 1, 2, 2)]),
        ({"e.0.x.0": 1, "e.0.x.1": 2}, [ModuleRow("e.0.x.1", 1, 2, 2), ModuleRow("e.0.x.0", 1, 1, 1)]),
        ({}, []),
    ],
)
def test_modules_that_differ_in_a_number_are_one_row(sizes: dict[str, int], rows: list[ModuleRow]) -> None:
    assert fold_modules(sizes) == rows


def test_the_first_screen_in_chinese() -> None:
    finding = Finding(
        "growing_memory",
        "head",
        2 * MIB,
        "evidence",
        "something keeps each batch: delete its references at the end of the step",
    )
    with in_language("zh"):
        found = lines(print_summary, view_profile(private_profile(findings=[finding])))
    assert "峰值 20.00 MiB 出现在第 1 步的反向传播，设备 cpu" in found
    assert any(
        line.startswith("隐私的代价 其中 13.00 MiB，占 65.0 %：per_sample_gradients 12.00 MiB") for line in found
    )
    at = found.index("内存持续增长，位于 head, 2.00 MiB")
    assert found[at + 1] == "   evidence"
    assert found[at + 2].endswith("  每个批次都被保留：请在每步结束时删除对它的引用")
    assert any(line.split() == ["per_sample_gradients", "12.00", "MiB", "60.0", "%", "█" * 20] for line in found)
    assert "每个字节都有归属" in found


def test_memory_that_ran_out_in_chinese() -> None:
    with in_language("zh"):
        found = lines(print_failure, out_of_memory())
    assert "内存不足 发生在第 0 步的反向传播，设备 cpu" in found
    assert "为模块 head 的 per sample gradients 分配 12.00 MiB 失败" in found
    assert "没有已知的修改能让它放得下。" in found


def test_an_ascii_terminal_gets_bars_of_signs_and_all_names() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_summary(view_profile(private_profile()), Console(file=stream, width=80, color_system=None))
    stream.seek(0)
    text = stream.read()
    assert "#" * 20 in text
    assert "blocks.[0-2].mlp  x3" in text
