# SPDX-License-Identifier: Apache-2.0
"""The release of a package with which a training began to need more memory is found, in a made wheelhouse."""

import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from opacus_memprof.cli import app
from opacus_memprof.errors import MemprofError

WIDTHS = {"1.0": 1024, "1.2": 1024, "1.9": 1024, "1.10": 2048, "1.11": 2048, "1.12rc1": 9}  # 1.9 is before 1.10
TRAINING = """
import torch, wide
model = torch.nn.Linear(1024, wide.WIDTH).cuda()
for _ in range(2):
    model(torch.ones(8, 1024).cuda()).sum().backward()
    model.zero_grad()
"""


@pytest.fixture
def wheelhouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAINING)
    folder = tmp_path / "wheels"
    folder.mkdir()
    for version, width in WIDTHS.items():
        about = f"wide-{version}.dist-info"
        with zipfile.ZipFile(folder / f"wide-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("wide.py", f"WIDTH = {width}\n")
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: wide\nVersion: {version}\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
    return folder


def bisect(wheelhouse: Path, good: str, bad: str, *options: str) -> str:
    arguments = ["--good", good, "--bad", bad, "--wheelhouse", str(wheelhouse), *options, "train.py"]
    result = CliRunner().invoke(app, ["bisect", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.mark.slow
def test_the_release_is_found(wheelhouse: Path) -> None:
    lines = bisect(wheelhouse, "wide==1.0", "wide==1.11").splitlines()
    assert lines[:4] == ["wide 1.0: good", "wide 1.11: bad", "wide 1.9: good", "wide 1.10: bad"]
    assert lines[5] == "wide 1.10 is the first release that needs more; what changed since wide 1.9:"
    assert any("model_parameters" in line and "+4.00 MiB" in line for line in lines[6:])
    with pytest.raises(MemprofError, match=r"wide==1\.9 needs no more memory than wide==1\.0, within 50MiB: there is"):
        bisect(wheelhouse, "wide==1.0", "wide==1.9", "--above", "50MiB")  # from the profiles that are there


@pytest.mark.parametrize(
    ("good", "bad", "sentence"),
    [
        ("wide", "wide==1.2", "wide and wide==1.2 are not two releases: write PACKAGE==VERSION"),
        ("wide==1.0", "narrow==1.2", "wide==1.0 and narrow==1.2 are releases of different packages"),
        ("wide==1.0", "wide==3", "pip finds no wide 3, only 1.0, 1.2, 1.9, 1.10, 1.11, 1.12rc1"),
        ("wide==1.10", "wide==1.9", "wide==1.10 is not before wide==1.9"),
        ("wide==one", "wide==1.9", "Invalid version: 'one': give a version as pip knows it"),
    ],
)
def test_refusals(wheelhouse: Path, good: str, bad: str, sentence: str) -> None:
    with pytest.raises(MemprofError) as refused:
        bisect(wheelhouse, good, bad)
    assert str(refused.value).startswith(sentence)
