# SPDX-License-Identifier: Apache-2.0
"""With what else a run of tests may have: workers, isolation, asynchronous tests, JUnit, tables."""

import json
import re
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

import opacus_memprof
from opacus_memprof.pytest_plugin import isolation
from tests.plugin.conftest import LOAD, TRAINING, Run


def test_tables_and_properties(run: Run, pytester: pytest.Pytester) -> None:
    result = run(
        """
import anyio

kept = []

@pytest.fixture
def anyio_backend():
    return "asyncio"

def test_small():
    block(1)

@pytest.mark.parametrize("mib", [3, 2])
def test_sizes(mib):
    kept.append(block(mib))

@pytest.mark.anyio
@pytest.mark.limit_gpu_memory("6 MiB")
async def test_async():
    in_use = block(7)
    await anyio.sleep(0)

def test_nothing():
    pass
""",
        "-p",
        "anyio",
        "--memprof",
        "--memprof-report=out",
        "--junitxml=junit.xml",
    )
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*limit_gpu_memory: 7.00 MiB *",
            "*= memory =*",
            "test *device *peak *in *mostly *left *outcome",
            "test_it.py::test_async *cpu *7.00 MiB *idle *unattributed 7.00 MiB *failed",
            "test_it.py::test_sizes[[]3[]] *cpu *3.00 MiB *idle *unattributed 3.00 MiB *3.00 MiB *passed",
            "test_it.py::test_sizes[[]2[]] *cpu *2.00 MiB *idle *unattributed 2.00 MiB *2.00 MiB *passed",
            "test_it.py::test_small *cpu *1.00 MiB *idle *unattributed 1.00 MiB *passed",
            "profiles and summary of memory: *out",
        ]
    )
    markdown = (pytester.path / "out" / "summary.md").read_text().splitlines()
    assert markdown[0] == "| test | device | peak | in | mostly | left | outcome |"
    assert markdown[3].startswith("| test_it.py::test_sizes[3] | cpu | 3.00 MiB | idle | unattributed 3.00 MiB | 3.00")
    cases = {case.get("name"): case for case in ET.parse(pytester.path / "junit.xml").iter("testcase")}
    properties = {entry.get("name"): entry.get("value") for entry in cases["test_sizes[3]"].iter("property")}
    assert properties == {
        "memprof.cpu.peak_bytes": str(3 * 2**20),
        "memprof.cpu.phase": "idle",
        "memprof.cpu.step": "0",
        "memprof.cpu.categories.unattributed": str(3 * 2**20),
        "memprof.cpu.left_bytes": str(3 * 2**20),
    }


def test_a_summary_that_cannot_be_written(run: Run, pytester: pytest.Pytester) -> None:
    (pytester.path / "out" / "summary.md").mkdir(parents=True)
    result = run("def test_nothing():\n    pass\n", "--memprof-report=out")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["the summary of memory is missing: cannot write *summary.md (*): choose another place"]
    )
    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_pytest_asyncio(run: Run) -> None:
    result = run(
        """
import asyncio

async def made(mib):
    await asyncio.sleep(0)
    return block(mib)

@pytest.mark.asyncio
@pytest.mark.limit_gpu_memory("4 MiB")
async def test_it(memprof):
    both = await asyncio.gather(made(2), made(3))
    assert memprof.peak() == 5 * MIB
""",
        *("-p", "pytest_asyncio.plugin", "-o", "asyncio_default_fixture_loop_scope=function"),
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["limit_gpu_memory: 5.00 MiB *1.00 MiB more than the limit*"])


ISOLATED = """
import os

@pytest.mark.memprof_isolated
@pytest.mark.limit_gpu_memory("1 MiB")
@pytest.mark.parametrize("mib", [2])
def test_alone(mib):
    open(f"pid-{mib}", "w").write(str(os.getpid()))
    open("worker-" + os.environ["PYTEST_XDIST_WORKER"], "w").close()
    print("from inside")
    block(mib)

@pytest.mark.parametrize("name", ["a", "b"])
def test_here(memprof, name):
    block(5)
    memprof.check_baseline("shared", rel=0)

def test_pid():
    open("pid-here-" + str(os.getpid()), "w").close()
"""


DYING = """
import os, signal, pytest

@pytest.mark.memprof_isolated
def test_killed():
    print("last words", flush=True)
    open("worker-" + os.environ["PYTEST_XDIST_WORKER"], "w").close()
    os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.memprof_isolated
@pytest.mark.skip(reason="not now")
def test_skipped():
    pass
"""


def test_isolated_and_on_workers(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run under pytest-xdist has both: reports, properties and baselines come back through either."""
    pytest.importorskip("xdist")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pytester.makepyfile(test_it=TRAINING + ISOLATED, test_dying=DYING)
    options = (
        "-p",
        "xdist",
        "-n2",
        "--memprof",
        "--memprof-report=out",
        "--memprof-update-baselines",
        "-W",
        "ignore",
        "-rfs",
    )
    result = pytester.runpytest_subprocess(*LOAD, *options, timeout=240)
    result.assert_outcomes(passed=3, failed=2, skipped=1)
    result.stdout.fnmatch_lines_random(
        [
            "*limit_gpu_memory: 2.00 MiB (2097152 bytes) of memory on cpu*",
            "from inside",
            "*the process of this isolated test was killed by signal 9 before the test was over*",
            "test_it.py::test_alone[[]2[]] *cpu *2.00 MiB *failed",
            "test_it.py::test_here[[]a[]] *cpu *5.00 MiB *passed",
            "SKIPPED*not now",
        ]
    )
    here = {path.name for path in pytester.path.glob("pid-here-*")}
    assert len(here) == 1
    assert f"pid-here-{(pytester.path / 'pid-2').read_text()}" not in here
    assert {path.name for path in pytester.path.glob("worker-*")} == {"worker-gw0", "worker-gw1"}
    (entry,) = json.loads((pytester.path / "memprof_baselines" / "shared.json").read_text())["baselines"]
    assert entry["peak_bytes"] == 5 * 2**20
    profiles = [path.parent.name for path in (pytester.path / "out").glob("*/profile.json")]
    assert all(re.fullmatch(r"test_it\.py_test_\w+-[0-9a-f]{8}", name) for name in profiles), profiles
    assert len(profiles) == 4  # of all but the killed and the skipped


@pytest.mark.parametrize(("code", "ending"), [(3, "ended with exit code 3"), (-9, "was killed by signal 9")])
def test_what_an_isolated_test_gets_of_its_run(code: int, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory options, but none that are for the whole run."""
    options = {
        "override_ini": ["a=b"],
        "importmode": "importlib",
        "plugins": ["no:x", "y"],
        "pythonwarnings": ["error"],
    }
    options |= {
        "--memprof-report": "out",
        "--memprof-compare": "main",
        "--memprof-virtual-gpu": "t4",
        "--memprof": True,
    }
    item = MagicMock(nodeid="test_it.py::test_it", location=("test_it.py", 1, "test_it"))
    item.get_closest_marker.return_value = None
    item.config.configure_mock(rootpath="/project", inipath="/project/pytest.ini", getoption=options.get)
    calls: list[Any] = []

    def start(command: list[str], **how: Any) -> Any:
        calls.append((command, how["env"]))
        return MagicMock(returncode=code, stdout="last words")

    monkeypatch.setenv("PYTEST_ADDOPTS", "-n2")
    monkeypatch.setattr(subprocess, "run", start)
    isolation.run(item)
    ((command, environment),) = calls
    assert command[3] == "/project/test_it.py::test_it"
    assert command[4:] == [
        *("--rootdir=/project", "-c", "/project/pytest.ini", "-o", "a=b", "-o", "addopts=", "--import-mode=importlib"),
        *("-p", "y", "-W", "error", "--memprof-report", "out", "--memprof-compare", "main"),
        *("--memprof-virtual-gpu", "t4", "--memprof", "-p", isolation.__name__),
    ]
    assert "PYTEST_ADDOPTS" not in environment
    (report,) = (call.kwargs["report"] for call in item.ihook.pytest_runtest_logreport.call_args_list)
    assert report.longrepr == f"the process of this isolated test {ending} before the test was over\nlast words"
    assert report.failed


def test_every_profiled_test_isolated(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What isolation does is tested above."""
    isolated = []
    monkeypatch.setattr(isolation, "run", lambda item: isolated.append(item.name))
    run(
        """
def test_profiled(memprof): pass

@pytest.mark.limit_gpu_leaks("1 B")
def test_limited(): pass

def test_plain(): pass
""",
        "--memprof-isolated",
    ).assert_outcomes(passed=1)
    assert isolated == ["test_profiled", "test_limited"]


def test_a_session_that_is_running_already(run: Run, tmp_path: Path) -> None:
    with opacus_memprof.profile(tmp_path / "outer", device="cpu"):
        result = run("def test_it(memprof): pass")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["opacus-memprof: a profile is being recorded into */outer already: one session*"])


def test_a_report_that_cannot_be_written(run: Run, pytester: pytest.Pytester) -> None:
    (pytester.path / "out").write_text("")
    result = run("def test_it(memprof): pass", "--memprof-report=out")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --memprof-report: *out is not a directory (File exists)"])


def test_baselines_that_are_no_directory(run: Run, pytester: pytest.Pytester) -> None:
    (pytester.path / "kept").write_text("")
    result = run("def test_it(memprof): pass", "--memprof-baseline-dir=kept")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --memprof-baseline-dir: kept is a file: give a directory"])
