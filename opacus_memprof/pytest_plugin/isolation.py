# SPDX-License-Identifier: Apache-2.0
"""Runs tests that are marked `memprof_isolated` or `fits` in a new process, and reports as if they had run here.

The process is not forked. After a fork, CUDA cannot be used if the parent has used it, and a parent with threads may
leave a lock that nobody releases. The new process loads this file as a pytest plugin, which passes the reports back.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from opacus_memprof.pytest_plugin.on_virtual_gpu import Fits

REPORTS = "OPACUS_MEMPROF_PYTEST_REPORTS"  # environment variable: the path of a file of JSON lines


def is_child(config: pytest.Config) -> bool:
    """Returns whether this is the process of an isolated test."""
    return config.pluginmanager.hasplugin(__name__)


def run(item: pytest.Item) -> None:
    """Runs the test in a new process and passes its reports to pytest. If the process dies, the test fails."""
    hook, location = item.ihook, item.location
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=location)
    with tempfile.TemporaryDirectory(prefix="memprof_isolated_") as folder:
        reports = Path(folder) / "reports"
        reports.touch()
        environment = {
            **os.environ,
            REPORTS: str(reports),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        environment.pop("PYTEST_ADDOPTS", None)
        completed = subprocess.run(
            _command(item),
            cwd=item.config.invocation_params.dir,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        ended = False
        for line in reports.read_text(encoding="utf-8").splitlines():
            report = item.config.hook.pytest_report_from_serializable(config=item.config, data=json.loads(line))
            if isinstance(report.longrepr, list):
                report.longrepr = tuple(report.longrepr)  # of a skipped test: JSON has no tuples
            ended = report.when == "teardown"
            hook.pytest_runtest_logreport(report=report)
    if not ended:
        code = completed.returncode
        ending = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        message = f"the process of this isolated test {ending} before the test was over\n{completed.stdout}"
        died = pytest.TestReport(item.nodeid, location, {}, "failed", message, "call")
        hook.pytest_runtest_logreport(report=died)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=location)


def _command(item: pytest.Item) -> list[str]:
    """Returns the command that runs pytest for this test only, with the same root, configuration and plugins.

    Memory options stay. The project's `addopts` are omitted, because parallel runs, reports and filters are for the
    parent process only.
    """
    config = item.config
    command = [
        sys.executable,
        "-m",
        "pytest",
        f"{config.rootpath}{os.sep}{item.nodeid}",
        f"--rootdir={config.rootpath}",
    ]
    if config.inipath is not None:
        command += ["-c", str(config.inipath)]
    for override in config.getoption("override_ini") or []:
        command += ["-o", override]
    command += ["-o", "addopts=", f"--import-mode={config.getoption('importmode')}"]
    for plugin in config.getoption("plugins") or []:
        if not plugin.startswith("no:"):
            command += ["-p", plugin]
    for warning in config.getoption("pythonwarnings") or []:
        command += ["-W", warning]
    options = ["--memprof-report", "--memprof-baseline-dir", "--memprof-compare"]
    fits = Fits.from_item(item)
    if fits is None:
        options += ["--memprof-virtual-gpu", "--memprof-virtual-memory"]
    else:
        command += ["--memprof-virtual-gpu", fits.gpu, "-o", "memprof_virtual_memory="]
    for option in options:
        if config.getoption(option) is not None:
            command += [option, config.getoption(option)]
    for option in ("--memprof", "--memprof-update-baselines"):
        if config.getoption(option):
            command.append(option)
    return [*command, "-p", __name__]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Writer(config))


class _Writer:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with open(os.environ[REPORTS], "a", encoding="utf-8") as file:
            file.write(json.dumps(data, default=str) + "\n")
