# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof replay` of what was recorded on a GPU, against plain runs there with the same settings."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from opacus_memprof.planning.replay import read_recording, replay

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "integration" / "scripts"
TRIED = ("", "expandable_segments:True", "max_split_size_mb:21", "roundup_power2_divisions:[64:1,>:4]")


def counted(*command: str | Path, settings: str = "") -> dict[str, int]:
    """What a script's last line says torch has counted."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    environment |= {"PYTORCH_CUDA_ALLOC_CONF": settings} if settings else {}
    ran = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    line = next(line for line in ran.stdout.splitlines() if line.startswith('{"requested"'))
    found: dict[str, int] = json.loads(line)
    return found


@pytest.mark.true_numbers
@pytest.mark.parametrize(
    ("script", "arguments"), [("train_fragments.py", ()), ("train_cuda.py", ("--width", "512", "--batch", "96"))]
)
def test_settings_reserve_what_a_run_with_them_does(tmp_path: Path, script: str, arguments: tuple[str, ...]) -> None:
    program: tuple[str | Path, ...] = (SCRIPTS / script, *arguments)
    recorded = counted("-m", "opacus_memprof", "run", "-o", tmp_path, *program)
    replays = replay(read_recording(tmp_path, "h200", None), TRIED)
    for one in replays:
        run = counted(*program, settings=one.settings)
        assert one.fits
        assert one.requested == run["requested"]
        # Of the libraries' workspaces a run asks cuBLAS, whose answer no setting changes.
        assert one.reserved == pytest.approx(run["reserved"], rel=0.01), one.settings
    assert replays[0].reserved == recorded["reserved"]
