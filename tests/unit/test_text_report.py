# SPDX-License-Identifier: Apache-2.0
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from event_files import EventFile
from made_profiles import a_device, a_peak, a_profile
from rich.console import Console
from typer.testing import CliRunner

from opacus_memprof.analysis.profile import build_profile
from opacus_memprof.analysis.profile_view import view_profile
from opacus_memprof.cli import app
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.profile import Device, Profile
from opacus_memprof.reports.text import print_profile

LONG = "base_model.model.model.layers.31.self_attn.q_proj.lora_A.default"


def printed(profile: Profile, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_profile(view_profile(profile), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(text: str, name: str) -> str:
    """The one line that begins with a name."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(name)]
    return line


def device(snapshots: Sequence[Any] = (), out_of_memory: Sequence[Any] = (), **peak: Any) -> Device:
    """At a peak of 4 MiB."""
    sizes = {"model_parameters": 2**20, "activation_hooks": 3 * 2**20, "noise": 0}
    at_peak: dict[str, Any] = {
        "requested_bytes": 4 * 2**20,
        "step": 3,
        "phase": "backward",
        "categories": sizes,
        "activation_hooks": {"shared_with_autograd": 2**20, "opacus_only": 2 * 2**20},
        "modules": {LONG: {"activation_hooks": 3 * 2**20}, "": {"model_parameters": 2**20}},
    }
    phases = {"backward": {"peak_bytes": 4 * 2**20, "step": 3, "categories": sizes}}
    return a_device(
        peak=a_peak(**at_peak | peak), phases=phases, snapshots=[*snapshots], out_of_memory=[*out_of_memory]
    )


def profile_of(**pieces: Any) -> Profile:
    return a_profile(**{"devices": {"cuda:0": device()}, **pieces})


def test_the_breakdown_is_sorted_and_has_no_zeros() -> None:
    text = printed(profile_of())
    assert "cuda:0: peak of 4.00 MiB in backward of step 3" in text
    hooks, parameters = row(text, "activation_hooks"), row(text, "model_parameters")
    assert text.index(hooks) < text.index(parameters)
    assert "3.00 MiB" in hooks
    assert "75.0 %" in hooks
    assert "█" * 20 in hooks
    assert "1.00 MiB" in parameters
    assert "25.0 %" in parameters
    assert "█" * 6 + "▋" in parameters  # a third of 20 characters
    assert "noise" not in text
    assert text.index("only Opacus holds them") < text.index("autograd holds them as well")
    assert "2.00 MiB" in row(text, "only Opacus holds them")
    assert "Σ categories = requested bytes: exact" in text


def test_what_the_allocator_adds() -> None:
    counts = {"allocated_bytes": 5 * 2**20, "rounding": 2**20, "reserved_bytes": 8 * 2**20, "cached": 3 * 2**20}
    text = printed(profile_of(devices={"cuda:0": device(**counts)}))
    assert "4.00 MiB" in row(text, "requested ")
    assert "1.00 MiB" in row(text, "+ rounding")
    assert "5.00 MiB" in row(text, "= allocated")
    assert "3.00 MiB" in row(text, "+ cached")
    assert "8.00 MiB" in row(text, "= reserved")
    unknown = printed(profile_of())
    assert "rounding" not in unknown
    assert "reserved" not in unknown


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    text = printed(profile_of(warnings=["x" * 30 + " y" * 100]), width)
    assert max(map(len, text.splitlines())) <= width
    if width >= 80:
        assert "self_attn.q_proj.lora_A.default" in text  # a module's end tells more than its beginning
        assert "(no module)" in text


def test_components_have_a_table_where_there_are_several() -> None:
    components = {"attention": {"gradients": 3 * 2**20, "noise": 5}, "other": {"model_parameters": 2**20}}
    text = printed(profile_of(devices={"cuda:0": device(components=components)}))
    assert row(text, "attention").split() == ["attention", "3.00", "MiB", "75.0", "%", "gradients"]
    assert text.index("component ") < text.index("module ")
    text = printed(profile_of(devices={"cuda:0": device(components={"other": {"gradients": 1}})}))
    assert "component" not in text


def test_findings_are_wrapped_and_summarized_by_kind() -> None:
    found = [
        {"kind": "ghost_matrices", "module": f"h.{i}", "bytes": 1024, "evidence": "word " * 40, "remedy": "fix it"}
        for i in range(5)
    ]
    lines = printed(profile_of(findings=found)).splitlines()
    assert max(map(len, lines)) <= 80
    assert "ghost matrices in h.2, 1.00 KiB" in lines
    assert not any("h.3" in line for line in lines)
    assert "  and in 2 more modules, 2.00 KiB" in lines
    assert "    word word" in "\n".join(lines)  # a further line of the evidence
    assert lines.count("  remedy: fix it") == 3


def test_markup_in_names_is_text() -> None:
    evil = "[red]x[/red][/]"
    peak = {"modules": {evil: {evil: 4 * 2**20}}, "categories": {evil: 4 * 2**20}, "phase": evil}
    finding = {"kind": evil, "module": evil, "bytes": 1, "evidence": evil, "remedy": evil}
    failure = {"requested_bytes": 1, "live_bytes": 0, "category": evil, "module": evil, "phase": evil, "step": 0}
    at = device(out_of_memory=[failure], **peak)
    text = printed(profile_of(devices={evil: at}, warnings=[evil], findings=[finding], status=evil))
    assert text.count(evil) >= 13


def test_many_modules_are_summed_up() -> None:
    modules = {f"layers.{number}": {"gradients": 100 - number} for number in range(30)}
    text = printed(profile_of(devices={"cuda:0": device(modules=modules, requested_bytes=2565)}))
    assert "layers.9" in text
    assert "layers.10" not in text
    assert "1.57 KiB" in row(text, "20 more")  # 90 + 89 + … + 71 = 1610


def test_a_remainder_is_shown() -> None:
    text = printed(profile_of(devices={"cuda:0": device(remainder_bytes=-7)}))
    assert "Σ categories misses -7 bytes" in text
    assert "exact" not in text


def test_snapshots_that_differ_are_shown() -> None:
    snapshots = [
        {"name": "a", "remainder": 0},
        {"name": "b", "remainder": -512},
        {"name": "c", "remainder": 8},
        {"name": "d", "remainder": None},
    ]
    text = printed(profile_of(devices={"cuda:0": device(snapshots)}))
    assert '2 of 3 snapshots differ from what the allocator counts, "b" by -512 bytes' in text
    text = printed(profile_of(devices={"cuda:0": device(snapshots[:1])}))
    assert "and what the allocator itself counts, at 1 snapshot: exact" in text


@pytest.mark.parametrize(
    ("counted", "sentence"),
    [
        (None, None),
        (4 * 2**20, "and what the allocator itself counts, at the peak: exact"),
        (4 * 2**20 + 64, "the allocator itself counts +64 bytes at the peak"),
        (4 * 2**20 - 64, "the allocator itself counts -64 bytes at the peak"),
    ],
)
def test_what_the_allocator_counts_at_the_peak(counted: int | None, sentence: str | None) -> None:
    text = printed(profile_of(devices={"cuda:0": device(counted_bytes=counted)}))
    assert ("allocator itself counts" in text) == (sentence is not None)
    assert (sentence or "") in text


def test_warnings_failures_and_findings() -> None:
    failure = {
        "requested_bytes": 2**30,
        "live_bytes": 2**21,
        "category": "temp_matrices",
        "module": "head",
        "phase": "backward",
        "step": 2,
    }
    finding = {
        "kind": "leak",
        "module": "fc",
        "bytes": 2048,
        "evidence": "3 captures outstanding",
        "remedy": "call backward",
    }
    text = printed(
        profile_of(
            status="out_of_memory",
            exit_code=1,
            devices={"cuda:0": device(out_of_memory=[failure, failure])},
            warnings=["mind this"],
            findings=[finding],
        )
    )
    assert "out of memory, exit code 1" in text
    unwrapped = " ".join(text.split())
    assert "1.00 GiB of temp_matrices for head in backward of step 2, with 2.00 MiB live" in unwrapped
    assert "(2 allocations failed; this is the last)" in unwrapped
    assert "warning: mind this" in text
    assert "leak in fc, 2.00 KiB" in text
    assert "evidence: 3 captures outstanding" in text
    assert "remedy: call backward" in text


@pytest.mark.parametrize("devices", [{}, {"cpu": a_device()}, {"cpu": a_device(peak=a_peak(modules={"a": {}}))}])
def test_of_nothing_something_is_printed(devices: dict[str, Device]) -> None:
    assert printed(a_profile(devices=devices)).startswith("opacus-memprof")


def test_a_terminal_without_unicode() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_profile(view_profile(profile_of()), Console(file=stream, width=80))
    stream.seek(0)
    assert "3.00 MiB  75.0 %  " + "#" * 20 in stream.read()


def test_the_command_prints_a_directory(tmp_path: Path) -> None:
    file = EventFile(closed=False).add("alloc", 64, 2048, "gradients", phase="backward", module="fc")
    result = CliRunner().invoke(app, ["report", str(file.write(tmp_path)), "--full"])
    assert result.exit_code == 0
    assert result.output == printed(build_profile(tmp_path, status="killed", exit_code=None))
    assert "killed" in result.output
    assert "2.00 KiB" in row(result.output, "gradients")


def test_the_command_refuses_what_is_no_profile(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert isinstance(result.exception, MemprofError)  # which main() turns into exit code 2


def test_what_steps_and_idle_are() -> None:
    """Steps are numbered from 0; physical and logical ones are told apart where their numbers differ."""
    text = unwrapped_text(profile_of())
    assert "Steps count from 0." in text
    assert "logical" not in text
    assert "Idle is" not in text
    phases = {"idle": {"peak_bytes": 4 * 2**20, "step": 3, "logical_step": 1, "categories": {"noise": 4 * 2**20}}}
    peak = a_peak(requested_bytes=4 * 2**20, phase="idle", step=3, logical_step=1)
    text = unwrapped_text(profile_of(devices={"cuda:0": a_device(peak=peak, phases=phases)}))
    assert "peak of 4.00 MiB in idle time of step 3 (logical step 1)" in text
    assert "a logical step, of one or more of them, updates the parameters" in text
    assert "Idle is the time outside forward, backward, clipping and the optimizer's step." in text


def unwrapped_text(profile: Profile) -> str:
    return " ".join(printed(profile).split())


OOM = Path(__file__).parents[1] / "data" / "format_1_oom"


def reported(directory: Path, files: Sequence[str], *options: str) -> str:
    """Prints a report of a directory with some of the files of a run that ran out of memory."""
    for file in files:
        (directory / file).write_bytes((OOM / file).read_bytes())
    result = CliRunner().invoke(app, ["report", str(directory), *options])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize("option", [[], ["--full"], ["--html"]], ids=str)
def test_the_report_of_a_failed_allocation_alone_says_so(option: list[str], tmp_path: Path) -> None:
    text = reported(tmp_path, ["oom_report.json"], *option)
    assert "profile.json and events.bin are missing" in text
    assert ("OUT OF MEMORY" in text) == ("--full" not in option)
    assert "No memory was allocated" not in text
    if option == ["--html"]:
        assert '"suggestions":' in (tmp_path / "memprof.html").read_text()


def test_a_profile_without_the_report_of_its_failure_says_so(tmp_path: Path) -> None:
    text = reported(tmp_path, ["profile.json"])
    assert "PEAK" in text
    assert "oom_report.json is missing" in text
    assert "oom_report.json is missing" not in reported(tmp_path, ["oom_report.json"])
