# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for the process of an isolated test: writes pytest's reports to a file, one JSON object per line."""

import json
import os

import pytest

REPORTS = "OPACUS_MEMPROF_PYTEST_REPORTS"  # the environment variable with the path of the file


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Writer(config))


class _Writer:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with open(os.environ[REPORTS], "a", encoding="utf-8") as file:
            file.write(json.dumps(data, default=str) + "\n")
