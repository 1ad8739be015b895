# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for Opacus' own tests: the same random numbers in each run, the profiler around all on demand."""

from __future__ import annotations

import random
from pathlib import Path

import hypothesis
import numpy
import opacus
import pytest
import torch

import opacus_memprof

SESSION = pytest.StashKey[opacus_memprof.session.Session]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--profile-into", type=Path, help="record from the first test to the last, on the CPU")
    parser.addoption("--examples", type=int, default=100, help="that hypothesis tries where the test does not say")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.register_profile(  # decorators read it when the tests are imported
        "repeatable",
        max_examples=config.getoption("--examples"),
        derandomize=True,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("repeatable")
    directory = config.getoption("--profile-into")
    if directory is not None:
        session = opacus_memprof.profile(directory, device="cpu", max_events=2**24)
        session.start()
        session.attach(opacus.PrivacyEngine())  # whatever any engine's make_private returns
        config.stash[SESSION] = session


def pytest_runtest_setup() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def pytest_unconfigure(config: pytest.Config) -> None:
    if SESSION in config.stash:
        config.stash[SESSION].close()
