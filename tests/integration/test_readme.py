# SPDX-License-Identifier: Apache-2.0
"""Every python block of docs/python.md runs, each in a process of its own; the README shows a report of today."""

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


def test_the_output_speaks_todays_words() -> None:
    from opacus_memprof.recording import native

    output = re.search(r"<!-- output of make profile -->\n```text\n(.*?)```", README, re.DOTALL)
    assert output is not None
    rows = re.findall(r"^([a-z_]+) +[\d.]+ [KMG]?i?B +[\d.]+ %[^a-z\n]*$", output[1], re.MULTILINE)
    categories = {re.sub("^activation_hooks_.*", "activation_hooks", name) for name in native.names()["categories"]}
    assert {"model_parameters", "per_sample_gradients"} <= set(rows) <= categories
    assert "every byte accounted for" in output[1]
