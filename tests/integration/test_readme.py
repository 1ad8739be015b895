# SPDX-License-Identifier: Apache-2.0
"""The commands of the README and every python block of docs/python.md run; the README's links lead somewhere."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.warm_python import ENVIRONMENT, interpreter

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENT = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)

# What the blocks take as given: a training program.
PROGRAM = """
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(8, 2)
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(32, 8), torch.randint(2, (32,))), batch_size=8)


def train(model, optimizer, loader):
    for features, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(features), labels).backward()
        optimizer.step()

"""


@pytest.mark.parametrize("block", BLOCKS, ids=[f"block{index}" for index in range(len(BLOCKS))])
def test_a_block_runs(block: str, tmp_path: Path) -> None:
    needs_cuda_build = "change_current_allocator" in block
    if needs_cuda_build:
        from opacus_memprof.recording import native

        if not native.HAS_CUDA:
            pytest.skip("built without CUDA")
    completed = subprocess.run(
        [*interpreter(), "-c", ("" if needs_cuda_build else PROGRAM) + block],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=ENVIRONMENT,
    )
    assert completed.returncode == 0, completed.stderr


def test_the_blocks_show_the_whole_api() -> None:
    import opacus_memprof

    shown = "\n".join(BLOCKS) + "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    for name in set(opacus_memprof.__all__) - {"Session", "MemprofError"}:
        assert f"opacus_memprof.{name}" in shown, name
    for method in ("attach", "snapshot", "breakdown", "peak"):
        assert f"session.{method}(" in shown, method


def test_the_reference_has_the_whole_api() -> None:
    import opacus_memprof
    from opacus_memprof import clipping

    names = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    public = {f"opacus_memprof.{name}" for name in opacus_memprof.__all__} - {"opacus_memprof.session"}
    public |= {f"opacus_memprof.clipping.{name}" for name in clipping.__all__}
    assert public | {"opacus_memprof.session.current"} <= set(names)


URLS = re.findall(r"\]\((\S+?)\)", README)
HERE = re.compile(
    r"https://(?:github\.com/opacus-memprof/opacus-memprof/blob|raw\.githubusercontent\.com/opacus-memprof/opacus-memprof)"
    r"/main/([^#]+)"
)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


@pytest.mark.parametrize("url", URLS)
def test_links_of_the_readme_work_on_any_page(url: str) -> None:
    """An index shows it without the files beside it."""
    assert url.startswith("https://")
    if "opacus-memprof/opacus-memprof" in url:
        found = HERE.fullmatch(url)
        assert found is not None
        assert (ROOT / found[1]).is_file()


def test_the_picture_loads_nothing_and_has_todays_words() -> None:
    picture = (ROOT / "docs" / "images" / "out_of_memory.svg").read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\s\"<]+", picture))
    assert addresses == {"http://www.w3.org/2000/svg", "https://www.textualize.io"}
    text = re.sub(r"<[^>]+>", "", picture).replace("&#160;", " ")
    shown = ("OUT OF MEMORY", "FIX", "fits", "try these without a GPU", "HELD AT THE FAILURE", "finished")
    for words in (*shown, "LARGEST RESERVED", "WHAT PRIVACY COSTS"):
        assert words in text


def test_the_commands_of_make_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"make ([a-z]+)", README)) <= set(targets)


def test_the_number_of_categories_of_reports() -> None:
    from opacus_memprof.profiles.categories import REPORTED

    assert f"| {len(REPORTED)}, with those of DP-SGD |" in README


@pytest.mark.slow
def test_the_commands_of_the_readme_run(tmp_path: Path) -> None:
    from opacus_memprof.recording import native

    begin = "import argparse, torch\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr', type=float)\n"
    begin += "parser.parse_args()\ntorch.set_default_device('cuda' if torch.cuda.is_available() else 'cpu')\n"
    (tmp_path / "train.py").write_text(begin + PROGRAM + "train(model, optimizer, loader)\n")
    commands = re.findall(r"`opacus-memprof ([^`]+)`", README)
    assert {command.split()[0] for command in commands} == {"doctor", "run", "report", "tax", "plan"}
    for command in sorted(commands, key=lambda command: not command.startswith("run")):  # the others read its profile
        if command.startswith("plan") and not native.HAS_CUDA:
            continue
        words = ["memprof_profile" if word in ("DIR", "WITH", "WITHOUT") else word for word in command.split()]
        ran = subprocess.run(
            [*interpreter(), "-m", "opacus_memprof", *words],
            capture_output=True, text=True, timeout=300, cwd=tmp_path, env=ENVIRONMENT,
        )  # fmt: skip
        assert ran.returncode == 0, (command, ran.stdout, ran.stderr)
