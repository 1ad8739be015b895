# SPDX-License-Identifier: Apache-2.0
"""Where baselines cannot be written."""

from pathlib import Path

import pytest

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.difference import Baseline, BaselineKey
from opacus_memprof.pytest_plugin import baseline


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    measured = Baseline(BaselineKey("cpu", "2.15.0", "1.6.0", "none"), 1, {}, step=0, phase="idle")
    with pytest.raises(MemprofError, match=r"cannot write .*taken.memprof\.json \(.+\): choose another place"):
        baseline.update(tmp_path / "taken" / "memprof.json", measured)
    assert (tmp_path / "taken").read_text() == "a file"
