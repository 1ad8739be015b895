# SPDX-License-Identifier: Apache-2.0
"""The plugin of an isolated test's process: writes pytest's reports to a file, one a line."""

import json
import os

import pytest

REPORTS = "OPACUS_MEMPROF_PYTEST_REPORTS"  # the file's name is in this variable


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Writer(config))


class _Writer:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with open(os.environ[REPORTS], "a", encoding="utf-8") as file:
            file.write(json.dumps(data, default=str) + "\n")
