# SPDX-License-Identifier: Apache-2.0
"""Values for the arguments of the program that is planned, and changes of what it gives Opacus."""

import _io
import builtins
import importlib
import importlib.machinery
import io
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import opacus
import pytest
import torch
from opacus.utils.uniform_sampler import UniformWithReplacementSampler

from opacus_memprof.errors import MemprofError
from opacus_memprof.planning import run_process
from opacus_memprof.planning.changes import OpacusSetup
from opacus_memprof.planning.configuration import (
    PlannedConfiguration,
    PlannedProgram,
    Range,
    parse_modes,
    parse_range,
    parse_search,
    places_of_batch,
    with_argument,
    with_number,
)


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ("", "--batch-size 7"),
        ("--lr 1", "--lr 1 --batch-size 7"),
        ("--batch-size 3 --lr 1", "--batch-size 7 --lr 1"),
        ("--batch_size 3", "--batch_size 7"),
        ("--batch-size=3 x", "--batch-size=7 x"),
        ("batch_size=3", "batch_size=7"),
        ("--batch-size", "--batch-size --batch-size 7"),
        ("batch-size 3", "batch-size 3 --batch-size 7"),  # words of the program's own
    ],
)
def test_an_argument_is_changed_where_it_is_given(given: str, changed: str) -> None:
    assert with_argument(given.split(), "batch-size", 7) == tuple(changed.split())


def test_a_short_flag_is_itself() -> None:
    assert with_argument(["-b", "3"], "-b", 7) == ("-b", "7")
    assert with_argument([], "-b", 7) == ("-b", "7")


def test_a_program_with_a_title_was_given_no_arguments() -> None:
    program = PlannedProgram("call.py", ("function.pickle", "8"))
    assert (program.name, program.words) == ("call.py", ("function.pickle", "8"))
    titled = replace(program, title="train")
    assert (titled.name, titled.words) == ("train", ())


def test_ranges_and_modes() -> None:
    assert parse_range("batch-size=1..4096") == Range("batch-size", 1, 4096)
    assert parse_modes("hooks, ghost,hooks") == ("mode", ["hooks", "ghost"])
    assert parse_modes("clipping=ew") == ("clipping", ["ew"])


def test_a_ghost_clipping_program_s_criterion_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_private(engine: Any, *, criterion: str, grad_sample_mode: str) -> tuple[str, ...]:
        return ("model", "optimizer", "loader") if grad_sample_mode == "hooks" else ("model",)

    monkeypatch.setattr(opacus.PrivacyEngine, "make_private", make_private)
    OpacusSetup([{"kind": "grad_sample_mode", "value": "hooks"}])
    engine: Any = opacus.PrivacyEngine()
    prepared = engine.make_private(criterion="criterion", grad_sample_mode="ghost")
    assert prepared == ("model", "optimizer", "criterion", "loader")


def test_advice_is_applied_to_what_make_private_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model computes in 16 bits, its part keeps nothing but an input, and the optimizer keeps no states."""

    def make_private(engine: Any, **given: Any) -> tuple[Any, Any, None]:
        return given["module"], given["optimizer"], None

    monkeypatch.setattr(opacus.PrivacyEngine, "make_private", make_private)
    part = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Tanh())
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), part)
    adam = torch.optim.Adam(model.parameters(), lr=0.5)
    changes: list[dict[str, Any]] = [{"kind": "checkpoint", "modules": ["1"]}]
    OpacusSetup([*changes, {"kind": "dtype", "value": "bfloat16"}, {"kind": "optimizer", "value": "SGD"}])
    engine: Any = opacus.PrivacyEngine()
    module, optimizer, _ = engine.make_private(module=model, optimizer=adam)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: saved.append(kept) or kept, lambda kept: kept):
        output = module(torch.ones(2, 4))
    assert output.dtype == torch.bfloat16
    assert sum(each.shape == (2, 4) for each in saved) == 2  # inputs of the first layer and of the part
    output.sum().backward()
    optimizer.step()
    assert not optimizer.state
    assert (type(optimizer), optimizer.param_groups[0]["lr"]) == (torch.optim.SGD, 0.5)
    assert {id(each) for each in optimizer.param_groups[0]["params"]} == {id(each) for each in model.parameters()}


def test_drawn_batches_have_the_size_that_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(sampler: Any) -> Iterator[list[int]]:
        raise AssertionError

    monkeypatch.setattr(UniformWithReplacementSampler, "__iter__", drawn)
    monkeypatch.setattr(opacus.PrivacyEngine, "make_private", opacus.PrivacyEngine.make_private)
    OpacusSetup([{"kind": "drawn_batch", "value": 7}])
    for samples, size in ((100, 7), (5, 5)):
        sampler = UniformWithReplacementSampler(num_samples=samples, sample_rate=0.5, steps=3)
        assert [*sampler] == [[*range(size)]] * 3


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("BATCH = 256  # samples", "BATCH = 7  # samples"),
        ("    batch_size: int = 64", "    batch_size: int = 7"),
        ('cfg = {"lr": 1, "batch_size": 32, "img": 224}', 'cfg = {"lr": 1, "batch_size": 7, "img": 224}'),
        (
            "loader = DataLoader(data, num_workers=2, batch_size=64)",
            "loader = DataLoader(data, num_workers=2, batch_size=7)",
        ),
        ("  per_device_train_batch_size: 8", "  per_device_train_batch_size: 7"),
        ("conv2d = 3", "conv2d = 7"),
    ],
)
def test_a_number_in_a_line_is_changed(tmp_path: Path, text: str, changed: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"first = 1\n{text}\nlast = 3\n")
    assert with_number(str(file), 2, 7) == f"first = 1\n{changed}\nlast = 3\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (1, "does not say which number is meant in 'a, b = 1, 2'"),
        (2, "is meant in 'x = 0.5'"),
        (9, "has 2 lines"),
        (0, "has 2 lines"),
    ],
)
def test_a_line_without_a_number_to_change_is_refused(tmp_path: Path, line: int, words: str) -> None:
    file = tmp_path / "train.py"
    file.write_text("a, b = 1, 2\nx = 0.5\n")
    with pytest.raises(MemprofError, match=words):
        parse_search([f"{file}:{line}=1..9"])
    with pytest.raises(MemprofError, match="cannot be read"):
        parse_search([f"{tmp_path / 'none.py'}:1=1..9"])


@pytest.mark.parametrize(
    ("source", "places"),
    [
        ("BATCH = 256", ["train.py:1 (BATCH = 256)"]),
        ("import os\nB = int(os.environ.get('BATCH', 256))", ["env:BATCH (line 2)"]),
        ("p.add_argument('--train-batch-size', type=int, default=4)", ["train-batch-size (line 1)"]),
        ("cfg = dict(lr=1, bs=32)\n", ["train.py:1 (cfg = dict(lr=1, bs=32))"]),
        ("x = torch.zeros(batch, 128)\nclass C:\n  batch_size: int = 16", ["train.py:3 (batch_size: int = 16)"]),
        ("def train(:", []),
    ],
)
def test_where_a_program_has_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, places: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(source)
    assert places_of_batch(PlannedProgram("train.py")) == places


def test_a_program_finds_the_values_that_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its environment, in a file that it opens, and in a module of which there is bytecode."""
    for module, name in ((builtins, "open"), (io, "open"), (io, "open_code"), (_io, "open_code")):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(
        importlib.machinery.SourceFileLoader, "path_stats", importlib.machinery.SourceFileLoader.path_stats
    )
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(run_process, "_NOT_READ", set())
    monkeypatch.setenv("BATCH", "1")
    monkeypatch.syspath_prepend(tmp_path)
    texts = {"made_settings.py": "BATCH = 64\n", "made.yaml": "batch: 64\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    module = importlib.import_module("made_settings")
    environment = dict(os.environ)

    configuration = PlannedConfiguration(PlannedProgram("train.py"), "t4")
    for name in ("env:BATCH", *(f"{tmp_path / each}:1" for each in texts)):
        configuration = Range(name, 1, 9).apply(configuration, 7)
    (tmp_path / "run").mkdir()
    run_process._apply(configuration, tmp_path / "run")
    assert os.environ["BATCH"] == "7"
    assert not run_process.has_changed(environment)  # no package reads it
    assert importlib.reload(module).BATCH == 7
    assert (tmp_path / "made.yaml").read_text() == "batch: 7\n"
    with open(tmp_path / "made.yaml", encoding="utf-8") as content:
        assert content.read() == "batch: 7\n"
    monkeypatch.undo()
    assert {name: (tmp_path / name).read_text() for name in texts} == texts
    sys.modules.pop("made_settings")
