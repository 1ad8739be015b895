# SPDX-License-Identifier: Apache-2.0
"""Files that are not what they should be are refused in a sentence that names the field."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.json_object import JsonObject, read_json_object, to_json
from opacus_memprof.profiles.oom_report import OomReport
from opacus_memprof.profiles.profile import Profile

DATA = Path(__file__).parents[1] / "data"
FILES = [
    *((DATA / f"format_1_{name}" / "profile.json", Profile) for name in ("ghost", "hooks", "oom")),
    (DATA / "format_1_oom" / "oom_report.json", OomReport),
]


def json_leaves(content: Any, path: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Every number, text and null in a document: what it lies in, its key there, and its path in words."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in items:
        place = f"{path}[{key}]" if isinstance(content, list) else f"{path}.{key}".removeprefix(".")
        if isinstance(value, (dict, list)):
            yield from json_leaves(value, place)
        else:
            yield content, key, place


def read_content(file: Path) -> Any:
    """What a file says, as plain JSON, and the defaults of what these files, of an older version, lack."""
    content = json.loads(file.read_text())
    if "events" in content:
        add_new(content["events"], gaps=[])
    for device in content.get("devices", {}).values():
        add_new(device, reserved_peak=None)
        add_new(device["peak"], lines={})
    if "holders" in content:
        add_new(content["holders"], unattributed={})
    if "largest_that_fits" in content.get("batch", {}):
        add_new(content["batch"], unit="sample")
    for suggestion in content.get("suggestions", []):
        add_new(suggestion, is_tight=False)
    return content


def add_new(content: dict[str, Any], **values: Any) -> None:
    assert not content.keys() & values.keys()
    content.update(values)


@pytest.mark.parametrize(("file", "kind"), FILES)
def test_whatever_is_wrong_is_named(file: Path, kind: type[JsonObject], tmp_path: Path) -> None:
    """An object stands instead of a number or text, 40 times at random."""
    content = json.loads(file.read_text())
    everything = list(json_leaves(content))
    for inside, key, place in random.Random(0).sample(everything, 40):
        before, inside[key] = inside[key], {}
        (tmp_path / "bad.json").write_text(json.dumps(content))
        inside[key] = before
        if place == "format":
            continue
        with pytest.raises(MemprofError) as refused:
            read_json_object(tmp_path / "bad.json", kind)
        sentence = str(refused.value)
        assert sentence.startswith(f"{tmp_path / 'bad.json'} is not the profiler's, because {place} should be ")
        assert sentence.endswith(" and is an object: profile again")
        assert "\n" not in sentence


@pytest.mark.parametrize(("file", "kind"), FILES)
def test_what_is_read_is_what_was_written(file: Path, kind: type[JsonObject]) -> None:
    assert json.loads(to_json(read_json_object(file, kind))) == read_content(file)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"pid": "1"}, "because pid should be a whole number and is text"),
        ({"pid": True}, "because pid should be a whole number and is true or false"),
        ({"error": 7}, "because error should be text or null and is a whole number"),
        ({"warnings": {}}, "because warnings should be a list and is an object"),
        ({"warnings": ["a", None]}, "because warnings[1] should be text and is null"),
        (
            {"events": {"recorded": 1, "dropped": 0, "capacity": 9, "closed": True}},
            "because it lacks events.contradictions",
        ),
        ({"format": "1"}, "because its format is '1'"),
        ({"format": 0}, "because its format is 0"),
    ],
)
def test_in_words(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    content = json.loads(FILES[0][0].read_text()) | change
    (tmp_path / "profile.json").write_text(json.dumps(content))
    with pytest.raises(MemprofError) as refused:
        read_json_object(tmp_path / "profile.json", Profile)
    assert str(refused.value) == f"{tmp_path / 'profile.json'} is not the profiler's, {sentence}: profile again"


@pytest.mark.parametrize(
    ("content", "needed"),
    [
        ({"format": 2, "versions": {"opacus_memprof": "0.7.1"}}, "opacus-memprof 0.7.1, which wrote it, or newer"),
        ({"format": 2, "environment": {"opacus_memprof": "8"}}, "opacus-memprof 8, which wrote it, or newer"),
        ({"format": 3}, "a newer opacus-memprof"),
        ({"format": 2, "versions": 3}, "a newer opacus-memprof"),
    ],
)
def test_a_newer_format_names_the_version_that_is_needed(content: dict[str, Any], needed: str, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(content))
    with pytest.raises(MemprofError) as refused:
        read_json_object(file, Profile)
    assert str(refused.value) == (
        f"{file} has format {content['format']}, and this release reads up to 1: read it with {needed}"
    )


def test_keys_that_later_releases_add_are_passed_over(tmp_path: Path) -> None:
    content = read_content(FILES[0][0])
    (tmp_path / "profile.json").write_text(json.dumps(content | {"mood": "good"}))
    assert read_json_object(tmp_path / "profile.json", Profile) == content


def test_a_structure_is_read_like_plain_json() -> None:
    content = read_content(FILES[0][0])
    profile = read_json_object(FILES[0][0], Profile)
    peak = profile["devices"]["cpu"]["peak"]
    assert peak["categories"] is profile.devices["cpu"].peak.categories
    assert {**peak} == content["devices"]["cpu"]["peak"]
    assert ("virtual" in profile, profile.get("virtual"), profile.get("pid")) == (False, None, content["pid"])
    assert list(profile) == list(profile.keys()) == list(content)
    with pytest.raises(KeyError, match="virtual"):
        profile["virtual"]
    assert not profile != content  # noqa: SIM202 (it has an operator of its own)
    assert profile != {**content, "pid": 0}
    assert profile != 7


def test_text_that_is_not_unicode_survives(tmp_path: Path) -> None:
    """As of a command whose arguments are bytes of a file name."""
    content = read_content(FILES[0][0]) | {"command": ["\udcff"]}
    (tmp_path / "profile.json").write_text(to_json(content))
    profile = read_json_object(tmp_path / "profile.json", Profile)
    assert profile.command == ["\udcff"]
    assert json.loads(to_json(profile)) == content
