# SPDX-License-Identifier: Apache-2.0
"""The first screens as a whole, in terminals of 80 and 140 columns: tests/data/screens has what each prints.

`UPDATE_SCREENS=1 pytest tests/unit/test_screens.py` writes the files anew; look at the difference.
"""

import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from event_files import EventFile
from made_profiles import a_device, a_peak, a_profile, an_oom_report
from rich.console import Console

from opacus_memprof.analysis.job_view import load_view
from opacus_memprof.analysis.profile_view import view_profile
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.directory import OOM_REPORTS
from opacus_memprof.profiles.json_object import to_json
from opacus_memprof.reports.summary import print_summary

KEPT = Path(__file__).parents[1] / "data" / "screens"
MIB = 2**20
FLASH_CLIP = (
    "from opacus_memprof import PrivacyEngine\nPrivacyEngine().make_private(..., grad_sample_mode='flash_clip')"
)


def an_event_file(directory: Path) -> Path:
    """What a killed process has left: 12 blocks of a model, and per-sample gradients of nine of them."""
    directory.mkdir()
    file = EventFile()
    for category, count, size, phase in (
        ("model_parameters", 12, 3, "setup"),
        ("activations", 12, 5, "forward"),
        ("per_sample_gradients", 9, 24, "backward"),
    ):
        for layer in range(count):
            place = 0x1000 * size + layer
            file.add("alloc", place, size * MIB, category, module=f"blocks.{layer}.mlp", phase=phase)
    return file.write(directory)


def finished(directory: Path, console: Console) -> None:
    sizes = {"per_sample_gradients": 1800 * MIB, "activations": 400 * MIB, "model_parameters": 100 * MIB}
    modules = {f"blocks.{layer}.mlp": {"per_sample_gradients": 150 * MIB} for layer in range(12)}
    peak = a_peak(requested_bytes=2300 * MIB, step=1, phase="backward", categories=sizes, modules=modules)
    improvements = [
        {
            "title": 'grad_sample_mode="flash_clip"',
            "code": FLASH_CLIP,
            "predicted_peak_bytes": 510 * MIB,
            "computed": "",
            "needs_edit": False,
        },
        {
            "title": "checkpoints around 12 repeated blocks",
            "code": "checkpoint(block, x, use_reentrant=True)",
            "predicted_peak_bytes": 2100 * MIB,
            "computed": "",
            "needs_edit": True,
        },
    ]
    device = a_device(
        peak=peak,
        phases={"backward": {"peak_bytes": 2300 * MIB, "step": 1, "categories": sizes}},
        reserved_peak={"bytes": 2600 * MIB, "step": 0, "phase": "optimizer_step"},
        improvements=improvements,
    )
    finding = {"kind": "discarded_gradients", "module": "", "bytes": 100 * MIB, "evidence": "", "remedy": "drop p.grad"}
    profile = a_profile(devices={"cuda:0": device}, findings=[finding], command=["train.py"])
    print_summary(view_profile(profile), console)


def out_of_memory(directory: Path, console: Console) -> None:
    titles = ["a physical batch of at most 2 samples instead of 16, and the same logical batch", "checkpoints"]
    actions = [[{"kind": "max_physical_batch_size", "value": 2}], [{"kind": "checkpoint"}]]
    suggestions = [
        {
            "title": title,
            "actions": action,
            "code": f"with BatchMemoryManager(data_loader=loader, {'max_physical_batch_size=2, ' * 3}) as loader:",
            "computed": "",
            "predicted_peak_bytes": (index + 1) * 300 * MIB,
            "saved_bytes": MIB,
            "fits": True,
        }
        for index, (title, action) in enumerate(zip(titles, actions, strict=True))
    ]
    held = {"activations": 440 * MIB, "activation_hooks": 328 * MIB, "model_parameters": 104 * MIB}
    modules = {f"blocks.{layer}.attention": {"activations": 56 * MIB} for layer in range(5)}
    report = an_oom_report(
        request={"bytes": 12 * MIB, "category": "per_sample_gradients", "module": "head", "phase": "backward"},
        needed={"bytes": 2468 * MIB},
        live_bytes=872 * MIB,
        room={"capacity_bytes": 944 * MIB},
        holders={"categories": held, "modules": modules},
        suggestions=suggestions,
    )
    (directory / OOM_REPORTS[1]).write_text(to_json(report))
    profile = a_profile(status="out_of_memory", exit_code=1, command=["train.py", "--mode", "hooks"])
    print_summary(view_profile(profile, directory), console)


def killed(directory: Path, console: Console) -> None:
    print_summary(load_view(an_event_file(directory / "run")), console)


def no_events(directory: Path, console: Console) -> None:
    print_summary(view_profile(a_profile(command=["train.py"])), console)


def other_version(directory: Path, console: Console) -> None:
    run = an_event_file(directory / "run")
    (run / "profile.json").write_text(json.dumps({"format": 2}))
    with pytest.raises(MemprofError) as refused:
        load_view(run)
    console.print(str(refused.value), soft_wrap=True)


SCREENS = (finished, out_of_memory, killed, no_events, other_version)


def printed(screen: Callable[[Path, Console], None], directory: Path, width: int, **options: Any) -> str:
    stream = io.StringIO()
    screen(directory, Console(file=stream, width=width, **options))
    text = stream.getvalue().replace(str(directory), "DIR")
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("screen", SCREENS, ids=lambda screen: screen.__name__)
def test_each_screen_is_as_it_was(screen: Callable[[Path, Console], None], width: int, tmp_path: Path) -> None:
    text = printed(screen, tmp_path, width)
    kept = KEPT / f"{screen.__name__}_{width}.txt"
    if os.environ.get("UPDATE_SCREENS"):
        KEPT.mkdir(exist_ok=True)
        kept.write_text(text, encoding="utf-8")
    assert text == kept.read_text(encoding="utf-8")


@pytest.mark.parametrize("screen", SCREENS, ids=lambda screen: screen.__name__)
def test_a_screen_fits_a_terminal_and_loses_nothing_without_colours(
    screen: Callable[[Path, Console], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what can be copied, a command or code, is longer than a line."""
    (tmp_path / "plain").mkdir()
    (tmp_path / "colours").mkdir()
    plain = printed(screen, tmp_path / "plain", 80)
    assert "\x1b" not in plain
    coloured = printed(screen, tmp_path / "colours", 80, force_terminal=True, color_system="standard")
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured).split() == plain.split()
    assert len(plain.splitlines()) <= 40
    long = [line for line in plain.splitlines() if len(line) > 80]
    assert all(line.startswith(("   ", "all tables:", "DIR")) for line in long)
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "none").mkdir()
    bare = printed(screen, tmp_path / "none", 80, force_terminal=True)
    assert not re.search(r"\x1b\[[\d;]*3[0-7]m", bare)
