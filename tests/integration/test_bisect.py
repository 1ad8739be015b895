# SPDX-License-Identifier: Apache-2.0
"""The release, or commit, of a package with which a training began to need more memory is found."""

import re
import shutil
import subprocess
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
        wheel(folder, version, f"WIDTH = {width}\n")
    return folder


def wheel(folder: Path, version: str, content: str) -> None:
    about = f"wide-{version}.dist-info"
    with zipfile.ZipFile(folder / f"wide-{version}-py3-none-any.whl", "w") as file:
        file.writestr("wide.py", content)
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: wide\nVersion: {version}\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")


def bisect(wheelhouse: Path | None, good: str, bad: str, *options: str) -> str:
    offline = [] if wheelhouse is None else ["--wheelhouse", str(wheelhouse)]
    arguments = ["--good", good, "--bad", bad, *offline, *options, "train.py"]
    result = CliRunner().invoke(app, ["bisect", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.mark.nightly
def test_the_release_is_found(wheelhouse: Path) -> None:
    lines = bisect(wheelhouse, "wide==1.0", "wide==1.11").splitlines()
    assert lines[:4] == ["wide 1.0: good", "wide 1.11: bad", "wide 1.9: good", "wide 1.10: bad"]
    assert lines[5] == "wide 1.10 is the first that needs more; what changed since wide 1.9:"
    assert any("model_parameters" in line and "+4.00 MiB" in line for line in lines[6:])
    with pytest.raises(MemprofError, match=r"wide==1\.9 needs no more memory than wide==1\.0, within 50MiB: there is"):
        bisect(wheelhouse, "wide==1.0", "wide==1.9", "--above", "50MiB")  # from the profiles that are there


@pytest.mark.parametrize(
    ("good", "bad", "sentence"),
    [
        (
            "wide",
            "wide==1.2",
            "wide and wide==1.2 are not two releases, or two commits: write PACKAGE==VERSION or 'PACKAGE @ git",
        ),
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


BACKEND = """
import shutil
def build_wheel(folder, settings=None, metadata=None):
    shutil.copy(NAME := "wide-1.0-py3-none-any.whl", folder)
    return NAME
"""
COMMITS = {"Start": "WIDTH = 1024", "Break": "", "Widen [bold]": "WIDTH = 2048", "Last": "WIDTH = 2048 #"}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a repository whose package has one version at all commits, which is installed here as well."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAINING)
    installed, package = tmp_path / "installed", tmp_path / "a repository"
    installed.mkdir()
    package.mkdir()
    wheel(installed, "1.0", "WIDTH = 8\n")
    with zipfile.ZipFile(next(installed.iterdir())) as archive:
        archive.extractall(installed)
    monkeypatch.syspath_prepend(installed)
    for key, value in {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}.items():
        monkeypatch.setenv(key, value)

    def git(*arguments: str) -> None:
        by = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org"]
        subprocess.run(["git", *by, *arguments], cwd=package, check=True, capture_output=True)

    git("init", "-b", "main")
    backend = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (package / "pyproject.toml").write_text(backend)
    (package / "backend.py").write_text(BACKEND)
    for subject, content in COMMITS.items():
        (package / "wide-1.0-py3-none-any.whl").unlink(missing_ok=True)
        if content:
            wheel(package, "1.0", f"{content}\n")
        git("add", ".")
        git("commit", "-m", subject)
        git("tag", subject.split()[0])
    return package.as_uri()


@pytest.mark.slow
def test_the_commit_is_found(repository: str) -> None:
    at = f"wide @ git+{repository}@"
    lines = bisect(None, f"{at}Start", f"{at}main").splitlines()
    tried = [re.sub(r"^wide [0-9a-f]{7,} ", "", line) for line in lines]
    assert tried[:2] == ["(Start): good", "(Last): bad"]
    assert tried[2].startswith("(Break): left out, because pip cannot install wide ")
    assert "FileNotFoundError" in tried[2]
    assert tried[3] == "(Widen [bold]): bad"
    assert tried[5].startswith("(Widen [bold]) is the first that needs more, or one of the 1 left out before it is; ")
    assert any("model_parameters" in line and "+4.00 MiB" in line for line in lines[6:])


@pytest.mark.parametrize(
    ("good", "bad", "sentence"),
    [
        ("wide @ git+{}@Start", "wide==1.0", "wide @ git+{}@Start and wide==1.0 are not two releases, or two commits"),
        ("wide @ git+{}@Start", "slim @ git+{}@Last", "wide @ git+{}@Start and slim @ git+{}@Last are commits of diff"),
        ("wide @ git+{}@Last", "wide @ git+{}@Start", "wide @ git+{}@Start does not come after wide @ git+{}@Last: "),
        ("wide @ git+{}@Last", "wide @ git+{}@main", "wide @ git+{}@main does not come after wide @ git+{}@Last: "),
        ("wide @ git+{}@Start", "wide @ git+{}@--all", "{} has no commit --all (fatal: Needed a single revision)"),
        ("wide @ git+{}/x@Start", "wide @ git+{}/x@Last", "git cannot read {}/x ("),
    ],
)
def test_refused_commits(repository: str, good: str, bad: str, sentence: str) -> None:
    good, bad, sentence = (text.replace("{}", repository) for text in (good, bad, sentence))
    with pytest.raises(MemprofError) as refused:
        bisect(None, good, bad)
    assert str(refused.value).startswith(sentence)
