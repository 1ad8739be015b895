# SPDX-License-Identifier: Apache-2.0
"""privacy_check.json: its records, its schema and the sentences of reports."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from msgspec import to_builtins
from torch import nn
from typer.testing import CliRunner

from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.analysis.profile_view import view_profile
from opacus_memprof.analysis.verdict_view import _numbers, describe_model, privacy_sentences
from opacus_memprof.cli import app
from opacus_memprof.clipping.layers import GenericLayer, layer_for
from opacus_memprof.clipping.proof.certificate import (
    Certificate,
    Checks,
    Description,
    EngineRecord,
    SituationRecord,
    describe_arguments,
)
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.directory import PRIVACY_CHECK
from opacus_memprof.profiles.json_object import convert_json
from opacus_memprof.profiles.privacy_check import CheckedSpan, PrivacyCheck, read_privacy_check, write_privacy_checks
from opacus_memprof.reports.html.report_page import build_html
from opacus_memprof.session import profile
from tests.unit.event_files import EventFile

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "docs" / "schemas" / "privacy_check.schema.json"


def description(**changed: Any) -> Description:
    given: dict[str, Any] = {
        "module": "",
        "arguments": "Tensor[B, n] float32",
        "autocast": None,
        "evaluating": (),
        "trained_parameters": 4,
        "trained_elements": 57,
        "tapped_layers": 2,
        "repeated": (("block", "vmap", ("scale",)),),
    }
    return Description(**{**given, **changed})


def certificate() -> Certificate:
    made = Certificate("flash_clip", nn.Linear(2, 2), "sometimes", "refuse")
    made.describe_clipping("flat", [], 1.0, 0.5, "mean")
    return made


def content(*models: Certificate) -> dict[str, Any]:
    """The file's content, which the schema allows."""
    record = EngineRecord()
    record.models += models
    found: dict[str, Any] = json.loads(json.dumps(record.to_data()))
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(found)
    return found


def profile_in(directory: Path) -> Path:
    event = EventFile(closed=False).add("alloc", 64, 2048, "gradients", phase="backward", module="fc")
    return Path(event.write(directory))


def sentence(model: Certificate) -> str:
    return describe_model(convert_json(content(model), PrivacyCheck, "test").models[0])


def test_consecutive_forwards_are_one_span() -> None:
    checks = Checks()
    for number in (1, 2, 2, 3, 5):
        checks.add("mixing", number)
    checks.add("mixing", 6, 0.25)
    assert checks.to_data() == {
        "mixing": [
            {"first": 1, "last": 3, "share": 1.0},
            {"first": 5, "last": 5, "share": 1.0},
            {"first": 6, "last": 6, "share": 0.25},
        ]
    }


@pytest.mark.parametrize(
    ("batches", "sizes"),
    [
        ((3,), [3, 3]),
        ((16, 2), [2, 16]),
        ((17,), [17, 31]),
        ((31,), [17, 31]),
        ((32,), [32, 63]),
        ((5, 100), [5, 127]),
        ((), []),
    ],
)
def test_sizes_of_large_batches_are_rounded(batches: tuple[int, ...], sizes: list[int]) -> None:
    record = SituationRecord(description())
    for batch in batches:
        record.begin_forward(batch)
    assert record.to_data()["batch_sizes"] == sizes
    assert record.forwards == len(batches)


def test_a_check_belongs_to_its_forward() -> None:
    record = SituationRecord(description())
    record.begin_forward(8)
    record.note("mixing")
    record.begin_forward(8)
    record.begin_forward(8)
    record.note("explained", forward=2)  # its step comes after another forward
    assert record.checks.to_data() == {
        "mixing": [{"first": 1, "last": 1, "share": 1.0}],
        "explained": [{"first": 2, "last": 2, "share": 1.0}],
    }


def test_a_situation_that_is_proved_anew_goes_on() -> None:
    made = certificate()
    first = made.situation(description())
    assert made.situation(description()) is first
    assert made.situation(description(evaluating=("norm",))) is not first
    assert len(made.situations) == 2


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((torch.ones(4, 7),), {}, "Tensor[B, n] float32"),
        ((torch.ones(4, 1, 4),), {"mask": torch.ones(4, 1).bool()}, "Tensor[B, 1, B] float32, mask=Tensor[B, 1] bool"),
        (
            (torch.ones(4).long(), [torch.ones(2)], None),
            {"scale": 2.0, "cached": True},
            "Tensor[B] int64, Tensor[n] float32, None, scale=float, cached=True",
        ),
    ],
)
def test_arguments_are_described(args: tuple[Any, ...], kwargs: dict[str, Any], expected: str) -> None:
    assert describe_arguments(args, kwargs, 4) == expected


def test_a_call_is_described() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2)))
    model[1].eval()
    generic = GenericLayer("1", model[1], ["0.weight", "0.bias"])
    generic.way = "loop"
    layers = [layer_for("0", model[0], ["weight", "bias"]), generic]
    found = Description.of(model, model[1], (torch.ones(5, 4),), {}, 5, layers, model[0].parameters())
    assert found == Description(
        module="1",
        arguments="Tensor[B, n] float32",
        autocast=None,
        evaluating=("1", "1.0"),
        trained_parameters=2,
        trained_elements=16,
        tapped_layers=1,
        repeated=(("1", "loop", ("0.weight", "0.bias")),),
    )


def test_bounds_and_refusals_are_kept() -> None:
    made = certificate()
    made.count_step(1.0, 0.5, 0.3)
    made.count_step(0.5, 0.75, 0.7, dropped=2)
    made.count_step(0.75, 0.5, 0.1, dropped=2)
    for _ in range(2):
        made.refuse(MemprofError("mixes."))
    found = content(made)["models"][0]
    assert (found["max_grad_norm"], found["noise_multiplier"]) == ([0.5, 1.0], [0.5, 0.75])
    assert found["steps"] == 3
    private = found["not_private"]
    assert private.pop("note").startswith("These values depend on the data and are not differentially private")
    assert private == {
        "largest_sum": 0.7,
        "dropped_samples": 2,
        "refused": 2,
        "refusals": [{"step": 4, "reason": "mixes.", "times": 2}],
    }


def test_not_more_than_a_hundred_reasons_are_kept() -> None:
    made = certificate()
    for i in range(150):
        made.refuse(MemprofError(f"sample {i}"))
    found = content(made)["models"][0]
    assert found["not_private"]["refused"] == 150
    assert [each["reason"] for each in found["not_private"]["refusals"]] == [f"sample {i}" for i in range(100)]


def test_the_file_is_what_the_structure_says(tmp_path: Path) -> None:
    made = certificate()
    made.situation(description()).begin_forward(4)
    written = content(made)
    path = write_privacy_checks([written], tmp_path / PRIVACY_CHECK)
    assert path == tmp_path / PRIVACY_CHECK
    read = read_privacy_check(path)
    assert to_builtins(read) == written == json.loads(path.read_text())
    del written["models"][0]["steps"]
    with pytest.raises(jsonschema.ValidationError, match="'steps' is a required property"):
        jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(written)


def test_engines_of_one_session_share_a_file(tmp_path: Path) -> None:
    first, second = content(certificate()), content(Certificate("hooks", nn.Linear(1, 1), "off", counts_steps=False))
    path = write_privacy_checks([first, second], tmp_path / PRIVACY_CHECK)
    assert path is not None
    assert [model["mode"] for model in json.loads(path.read_text())["models"]] == ["flash_clip", "hooks"]
    assert write_privacy_checks([], tmp_path / "other.json") is None
    assert not (tmp_path / "other.json").exists()


def test_a_check_that_is_followed_twice_is_written_once(tmp_path: Path) -> None:
    record = EngineRecord()
    record.models.append(certificate())
    with profile(tmp_path, device="cpu") as session:
        for _ in range(2):
            session.follow_privacy_check(record.to_data)
    assert len(json.loads((tmp_path / PRIVACY_CHECK).read_text())["models"]) == 1


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MemprofError, match=r"cannot write .*file/privacy_check\.json"):
        write_privacy_checks([content(certificate())], tmp_path / "file" / PRIVACY_CHECK)


def test_a_sentence_for_flash_clip() -> None:
    made = certificate()
    for evaluating in ((), ("norm",)):
        record = made.situation(description(evaluating=evaluating))
        for number in range(1, 65):
            record.begin_forward(8)
            if number & (number - 1) == 0:
                record.note("mixing")
            if number in (1, 8, 64):
                record.note("explained")
    for _ in range(128):
        made.count_step(1.0, 0.5)
    assert sentence(made) == (
        "flash_clip on Linear; 128 steps; 2 situations proved, mixing at forwards 1, 2, 4, 8, ..., 64, gradients "
        "explained by the outputs at forwards 1, 8, 64; nothing refused."
    )


def test_a_sentence_for_a_refused_run() -> None:
    made = certificate()
    made.refuse(MemprofError("samples mix."))
    assert sentence(made) == "flash_clip on Linear; 0 steps; 0 situations proved; 1 refusal, first: samples mix."


def test_checks_that_follow_one_another_are_one_span() -> None:
    spans = [CheckedSpan(first=first, last=last, share=1.0) for first, last in ((4, 5), (1, 3), (7, 7))]
    assert _numbers(spans, "step") == "steps 1-5, 7"


def test_sentences_for_modes_of_opacus() -> None:
    made = Certificate("hooks", nn.Linear(1, 1), "always")
    for step in range(1, 8):
        made.checks.add("mixing", step)
        made.checks.add("clipped_sum", step)
        made.count_step(1.0, 1.0)
    assert sentence(made) == (
        "hooks on Linear; 7 steps; mixing and clipped sums compared with those by hand at steps 1-7; nothing refused."
    )
    assert sentence(Certificate("ghost", nn.Linear(1, 1), "off", counts_steps=False)) == (
        'ghost on Linear; nothing was proved (check="off").'
    )


def test_report_prints_the_sentences(tmp_path: Path) -> None:
    directory = (
        EventFile(closed=False).add("alloc", 64, 2048, "gradients", phase="backward", module="fc").write(tmp_path)
    )
    assert "Privacy check" not in CliRunner().invoke(app, ["report", str(directory)]).output
    made = certificate()
    made.refuse(MemprofError("the output [4, 3] mixes."))
    write_privacy_checks([content(made)], tmp_path / PRIVACY_CHECK)
    output = " ".join(CliRunner().invoke(app, ["report", str(directory)]).output.split())
    said = "flash_clip on Linear; 0 steps; 0 situations proved; 1 refusal, first: the output [4, 3] mixes."
    assert f"Privacy check: {said}" in output
    assert privacy_sentences(tmp_path) == [said]


def test_a_damaged_file_leaves_the_report(tmp_path: Path) -> None:
    (tmp_path / PRIVACY_CHECK).write_text("{")
    (found,) = privacy_sentences(tmp_path)
    assert found.startswith(f"{tmp_path / PRIVACY_CHECK} cannot be read")


def test_the_page_has_the_sentences(tmp_path: Path) -> None:
    directory = (
        EventFile(closed=False).add("alloc", 64, 2048, "gradients", phase="backward", module="fc").write(tmp_path)
    )
    write_privacy_checks([content(certificate())], tmp_path / PRIVACY_CHECK)
    page = build_html([view_profile(load_profile(directory), directory)])
    assert '"privacy_check":["flash_clip on Linear; 0 steps; 0 situations proved; nothing refused."]' in page


def texts_of_code() -> str:
    """All texts in the code of clipping; what is put into them is three dots."""
    found = []
    for file in (ROOT / "opacus_memprof" / "clipping").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value if isinstance(part, ast.Constant) else "..." for part in parts]
            found.append("".join(text for text in texts if isinstance(text, str)))
    return "\n".join(found)


def test_the_refusals_in_the_documentation_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "flash_clip.md").read_text()
    table = page[page.index("| the sentence says |") : page.index("Three deliberate differences")]
    sentences = [text for row in table.splitlines()[2:] for text in re.findall("`([^`]+)`", row.split(" | ")[0])]
    assert len(sentences) > 20
    code = texts_of_code()
    for each in sentences:
        assert re.search(".*".join(map(re.escape, each.split("..."))), code), each
