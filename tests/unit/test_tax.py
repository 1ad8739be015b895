# SPDX-License-Identifier: Apache-2.0
import io
from pathlib import Path

import pytest
from event_files import EventFile
from msgspec.structs import replace
from rich.console import Console
from typer.testing import CliRunner

from opacus_memprof.analysis.diff import dp_tax
from opacus_memprof.analysis.profile import build_profile
from opacus_memprof.cli import app
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.difference import Tax
from opacus_memprof.profiles.profile import Profile
from opacus_memprof.reports.diff import print_tax

KIB = 1024


def private_file(device: int = 1) -> EventFile:
    """Peak 150 KiB: 64 of parameters, 6 captured by Opacus alone, 80 of per-sample gradients."""
    file = EventFile()
    file.add("alloc", 0x1000, 64 * KIB, "model_parameters", device=device, module="fc")
    file.add("alloc", 0x2000, 6 * KIB, "activation_hooks_opacus_only", device=device, module="act")
    file.add("alloc", 0x3000, 80 * KIB, "per_sample_gradients", device=device, module="fc")
    return file


def vanilla_file() -> EventFile:
    """Peak 94 KiB: 64 of parameters, 30 of activations that the private run does not hold at its peak."""
    file = EventFile()
    file.add("alloc", 0x1000, 64 * KIB, "model_parameters", module="fc")
    return file.add("alloc", 0x2000, 30 * KIB, "activations", module="act")


def profile_in(directory: Path, file: EventFile) -> Profile:
    directory.mkdir(exist_ok=True)
    return build_profile(file.write(directory), status="finished", exit_code=0)


def tax_in(path: Path) -> Tax:
    return dp_tax(profile_in(path / "private", private_file()), profile_in(path / "vanilla", vanilla_file()))


def test_the_difference_by_category_and_module(tmp_path: Path) -> None:
    assert tax_in(tmp_path) == {
        "devices": {
            "cuda:0": {
                "total": 56 * KIB,
                "private_bytes": 150 * KIB,
                "vanilla_bytes": 94 * KIB,
                "categories": {
                    "activations": -30 * KIB,
                    "activation_hooks": 6 * KIB,
                    "per_sample_gradients": 80 * KIB,
                },
                "modules": {
                    "fc": {"per_sample_gradients": 80 * KIB},
                    "act": {"activation_hooks": 6 * KIB, "activations": -30 * KIB},
                },
                "lines": {},
                "opacus_only": 6 * KIB,
            }
        },
        "notes": [],
    }


def test_captures_that_autograd_holds_anyway_are_no_cost(tmp_path: Path) -> None:
    private = private_file().add("alloc", 0x4000, 30 * KIB, "activation_hooks_shared", device=1, module="act")
    profiles = profile_in(tmp_path / "private", private), profile_in(tmp_path / "vanilla", vanilla_file())
    assert profiles[0]["devices"]["cuda:0"]["peak"]["categories"]["activation_hooks"] == 36 * KIB
    tax = dp_tax(*profiles)["devices"]["cuda:0"]
    assert tax["categories"] == {"activation_hooks": 6 * KIB, "per_sample_gradients": 80 * KIB}
    assert tax["modules"] == {"fc": {"per_sample_gradients": 80 * KIB}, "act": {"activation_hooks": 6 * KIB}}
    assert tax["total"] == tax["private_bytes"] - tax["vanilla_bytes"] == 86 * KIB


def test_in_print(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    print_tax(tax_in(tmp_path), console)
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines[0] == "cuda:0: privacy takes +56.00 KiB at the peak: 150.00 KiB with it, 94.00 KiB without"
    assert "per_sample_gradients  +80.00 KiB" in lines
    assert "activations           -30.00 KiB" in lines
    assert "act     -24.00 KiB" in lines
    assert lines.index("per_sample_gradients  +80.00 KiB") < lines.index("activations           -30.00 KiB")
    assert "6.00 KiB of captured activations are held by Opacus alone" in lines


def test_of_many_modules_the_nine_that_cost_most_are_printed(tmp_path: Path) -> None:
    private = vanilla_file()
    for number in range(1, 12):
        private.add("alloc", 0x10000 * number, number * KIB, "per_sample_gradients", module=f"layer{number}")
    console = Console(file=io.StringIO(), width=100, color_system=None)
    print_tax(dp_tax(profile_in(tmp_path / "a", private), profile_in(tmp_path / "b", vanilla_file())), console)
    rows = [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert [row[0] for row in rows if row and row[0].startswith("layer")] == [f"layer{n}" for n in range(11, 2, -1)]
    assert ["2", "more", "+3.00", "KiB"] in rows


def test_other_devices_are_refused(tmp_path: Path) -> None:
    private, vanilla = profile_in(tmp_path / "a", private_file()), profile_in(tmp_path / "b", vanilla_file())
    on_cpu = profile_in(tmp_path / "c", private_file(device=0))
    with pytest.raises(MemprofError, match="private run was on cpu and the vanilla one on cuda:0"):
        dp_tax(on_cpu, vanilla)
    on_both = replace(private, devices={**on_cpu.devices, **private.devices})
    with pytest.raises(MemprofError, match="private run was on cpu, cuda:0 and the vanilla one on cuda:0"):
        dp_tax(on_both, vanilla)
    with pytest.raises(MemprofError, match="the private profile has no device"):
        dp_tax(replace(private, devices={}), vanilla)


def test_peaks_of_the_counters_have_no_modules(tmp_path: Path) -> None:
    profiles = profile_in(tmp_path / "a", private_file()), profile_in(tmp_path / "b", vanilla_file())
    for profile in profiles:
        profile.devices["cuda:0"].peak.modules = {}
    tax = dp_tax(*profiles).devices["cuda:0"]
    assert tax.modules == {"": tax.categories}


def test_two_private_runs_are_refused(tmp_path: Path) -> None:
    noised = private_file()
    noised.add("alloc", 0x4000, KIB, "noise", phase="noise", module="fc")
    private, second = profile_in(tmp_path / "a", private_file()), profile_in(tmp_path / "b", noised)
    with pytest.raises(MemprofError, match="the vanilla run is private as well"):
        dp_tax(private, second)


def test_the_command(tmp_path: Path) -> None:
    for name, file in (("private", private_file()), ("vanilla", vanilla_file()), ("cpu", private_file(device=0))):
        (tmp_path / name).mkdir()
        file.write(tmp_path / name)
    result = CliRunner().invoke(app, ["tax", str(tmp_path / "private"), str(tmp_path / "vanilla")])
    assert result.exit_code == 0
    assert "+56.00 KiB" in result.stdout
    same = CliRunner().invoke(app, ["diff", "--vanilla", str(tmp_path / "vanilla"), str(tmp_path / "private")])
    assert same.stdout == result.stdout
    page = CliRunner().invoke(
        app, ["report", str(tmp_path / "private"), "--html", "--vanilla", str(tmp_path / "vanilla")]
    )
    assert page.exit_code == 0, page.output
    for other in ("cpu", "absent"):
        result = CliRunner().invoke(app, ["tax", str(tmp_path / other), str(tmp_path / "vanilla")])
        assert isinstance(result.exception, MemprofError)
        assert result.exception.exit_code == 2
        assert "\n" not in str(result.exception)
