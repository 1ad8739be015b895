# SPDX-License-Identifier: Apache-2.0
"""Where baselines cannot be written."""

from pathlib import Path

import pytest

from opacus_memprof.errors import MemprofError
from opacus_memprof.pytest_plugin import baseline


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(MemprofError, match=r"cannot write .*taken.memprof\.json \(.+\): choose another place"):
        baseline.update(tmp_path / "taken" / "memprof.json", {"key": {}})
    assert (tmp_path / "taken").read_text() == "a file"
