# SPDX-License-Identifier: Apache-2.0
"""GPU tests run with the recording allocator in place, and leave torch's own behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from opacus_memprof.recording import native


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # of the whole session
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.cuda)


@pytest.fixture
def recording() -> Iterator[None]:
    """Our allocator is the current one; nothing that a test before this one left is cached."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    native.cuda_install()
    yield
    torch.cuda.synchronize()
    native.cuda_uninstall()


@pytest.fixture(autouse=True)
def cache_given_back() -> Iterator[None]:
    """What a test left cached does not stay reserved while tests of other processes wait for an empty GPU."""
    yield
    torch.cuda.empty_cache()
