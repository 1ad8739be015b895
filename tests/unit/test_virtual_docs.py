# SPDX-License-Identifier: Apache-2.0
"""docs/virtual_gpu.md names the kinds, the options and the keys that there are, and its example runs."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from opacus_memprof import cli
from opacus_memprof.cli.options import VirtualGpuOptions
from opacus_memprof.profiles.units import format_bytes
from opacus_memprof.virtual_gpu import describe
from opacus_memprof.virtual_gpu.devices import GPUS
from tests.warm_python import ENVIRONMENT, interpreter

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "virtual_gpu.md").read_text(encoding="utf-8")


def test_every_kind_with_its_figures() -> None:
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (.+) \| (.+) \| (\d+\.\d+) \|$", DOCUMENT, re.MULTILINE)
    assert rows == [
        (kind, gpu.name, format_bytes(gpu.total_memory), f"{gpu.major}.{gpu.minor}") for kind, gpu in GPUS.items()
    ]


def test_every_option() -> None:
    command = typer.main.get_command(cli.app).commands["run"]  # type: ignore[attr-defined]
    ours = set(VirtualGpuOptions.__dataclass_fields__)
    flags = {flag for option in command.params if option.name in ours for flag in option.opts}
    assert len(flags) == len(ours)
    for flag in flags:
        assert f"`{flag}" in DOCUMENT, flag


@pytest.mark.skipif(sys.platform != "linux" or torch.version.cuda is None, reason="needs a torch with CUDA for Linux")
def test_its_example_runs_with_the_keys_of_a_profile(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    printing = "\nprint('keys:', *virtual_gpu.describe_run(), sep='\\n')"
    ran = subprocess.run(
        [*interpreter(), "-c", block + printing], capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT
    )
    assert ran.returncode == 0, ran.stderr
    keys = re.findall(r"^\| (`[a-z_`, ]+`) \|", DOCUMENT.partition("## How reports mark it")[2], re.MULTILINE)
    listed = [name for cell in keys for name in re.findall(r"`([a-z_]+)`", cell)]
    assert ran.stdout.splitlines() == ["keys:", *listed]


@pytest.mark.parametrize(
    ("kernels", "capability", "runs"),
    [
        (["sm_75", "sm_80", "sm_90", "sm_120"], (7, 0), False),  # a V100 with CUDA 13
        (["sm_75", "sm_80", "sm_90", "sm_120"], (8, 9), True),  # machine code runs on newer minors
        (["sm_75", "sm_80", "sm_90", "sm_120"], (10, 0), False),  # and on no other major
        (["sm_86"], (8, 0), False),
        (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False),  # for that architecture alone
        (["sm_100f"], (10, 3), True),  # for its family
        (["sm_70", "compute_70"], (12, 0), True),  # PTX is compiled for whatever is newer
        (["compute_90"], (8, 9), False),
        ([], (9, 0), True),  # a torch that does not say
    ],
)
def test_which_kernels_run_on_what(
    monkeypatch: pytest.MonkeyPatch, kernels: list[str], capability: tuple[int, int], runs: bool
) -> None:
    """As the CUDA C++ Programming Guide has it under binary, PTX and family compatibility."""
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: kernels)
    gpu = next(gpu for gpu in GPUS.values())
    object.__setattr__(fake := object.__new__(type(gpu)), "name", "a GPU")
    object.__setattr__(fake, "capability", capability)
    warnings = describe._kernel_warnings(fake)
    assert len(warnings) == (not runs)
    assert runs or f"(compute capability {capability[0]}.{capability[1]})" in warnings[0]


@dataclass(frozen=True)
class Use:
    """As virtual_gpu.values has it, which needs the extension."""

    operation: str
    line: str
    count: int
    frames: tuple[int, ...] = ()


def test_a_run_adds_up_its_uses_by_line() -> None:
    earlier: Any = describe._Counts([Use("item", "a.py:1", 2)], [], {"fft": 3}, {"cudaFoo": 1})
    uses = [Use("item", "a.py:1", 2), Use("item", "a.py:2", 3, (1,)), Use("item", "a.py:2", 4, (2,))]
    now: Any = describe._Counts(uses, [], {"fft": 3, "svd": 1}, {"cudaFoo": 2})
    counts = now.since(earlier)
    assert (counts.unknown_reads, counts.not_computed, counts.default_answers) == (uses[1:], {"svd": 1}, {"cudaFoo": 1})
    assert [(use.operation, use.line, use.count) for use in describe._by_line(counts.unknown_reads)] == [
        ("item", "a.py:2", 7)
    ]


def test_each_line_has_a_count_and_others_are_added() -> None:
    uses: Any = [Use("ranks: item", "a.py:1", 1), Use("item", "", 2), *(Use("item", f"b.py:{n}", 5) for n in range(21))]
    said = describe._sentences(uses, "read")
    assert said[:2] == ["item at a.py:1 read", "item in backward, 2 times, read"]
    assert said[20:] == ["15 more operations of 3 lines read"]
