# SPDX-License-Identifier: Apache-2.0
"""The base class of structures that are stored as JSON, and the functions that read and write them."""

import inspect
import json
import re
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.files import read_object

FORMAT: Final = 1  # of all files of a profile, and of results of experiments
REMEDY = "profile again"

T = TypeVar("T", bound="JsonObject")


class JsonObject(msgspec.Struct, kw_only=True, eq=False):
    """A JSON object with known fields.

    Fields are attributes: `profile.devices`. Code for plain JSON works as well: `profile["devices"]`,
    `profile.get("virtual")`, `{**peak}`, and comparisons with plain dicts. A field that is UNSET is absent.
    """

    def keys(self) -> KeysView[str]:
        return self._content().keys()

    def values(self) -> ValuesView[Any]:
        return self._content().values()

    def items(self) -> ItemsView[str, Any]:
        return self._content().items()

    def _content(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in fields.items() if value is not UNSET}

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key) if key in self else default

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise KeyError(key)
        return getattr(self, key)

    def __contains__(self, key: object) -> bool:
        return key in self.__struct_fields__ and getattr(self, str(key)) is not UNSET

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (JsonObject, dict)):
            return NotImplemented
        return self._content() == dict(other)

    def __ne__(self, other: object) -> bool:  # msgspec's own method would compare by type
        return not self == other


def to_json(content: Any, indent: int | None = None) -> str:
    """Serializes to one JSON document and a newline. Escapes text that is not Unicode, such as in some file names."""
    separators = (",", ":") if indent is None else None
    return json.dumps(content, indent=indent, separators=separators, default=msgspec.to_builtins) + "\n"


def schema_of(kind: type[JsonObject]) -> dict[str, Any]:
    """Returns the JSON Schema 2020-12 of a structure. It allows further keys, which later releases may add."""
    schema = msgspec.json.schema(kind)
    for part in schema["$defs"].values():
        part["description"] = inspect.cleandoc(part["description"])
        if "format" in part["properties"]:  # its default is for writers
            part["required"] = ["format", *part.get("required", ())]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def read_json_object(path: Path, kind: type[T], remedy: str = REMEDY) -> T:
    """Reads a structure of type `kind` from a JSON file.

    Raises:
        MemprofError: the file cannot be read, has a newer format, lacks a field or has one of another type. The message
            ends with `remedy`.
    """
    content = read_object(path, remedy)
    check_format(path, content, remedy)
    return convert_json(content, kind, str(path), remedy)


def convert_json(content: Any, kind: type[T], source: str, remedy: str = REMEDY) -> T:
    """Converts parsed JSON to a structure of type `kind`.

    Raises:
        MemprofError: a field is missing or of another type; the message names `source`.
    """
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise MemprofError(f"{source} {_error_message(content, kind, error)}: {remedy}") from None
    except UnicodeEncodeError:  # where one of several words is expected
        raise MemprofError(f"{source} is not the profiler's (it holds text that is not Unicode): {remedy}") from None


def check_format(path: Path, content: dict[str, Any], remedy: str = REMEDY) -> None:
    """Raises MemprofError if this release cannot read the `format` of `content`.

    Raises:
        MemprofError: the format is unknown or newer. The message names `path` and ends with a remedy.
    """
    version = content.get("format")
    if version == FORMAT:
        return
    if not isinstance(version, int) or isinstance(version, bool) or version < FORMAT:
        raise MemprofError(f"{path} is not the profiler's, because its format is {version!r}: {remedy}")
    versions = content.get("versions") or content.get("environment")
    writer = versions.get("opacus_memprof") if isinstance(versions, dict) else None
    needed = f"opacus-memprof {writer}, which wrote it, or newer" if writer else "a newer opacus-memprof"
    raise MemprofError(f"{path} has format {version}, and this release reads up to {FORMAT}: read it with {needed}")


_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "object": "an object",
    "array": "a list",
    "null": "null",
}


def _error_message(content: Any, kind: type[JsonObject], error: msgspec.ValidationError) -> str:
    """Returns a sentence that explains an error such as "Expected `int`, got `str` - at `$.devices[...].peak`"."""
    problem, _, at = str(error).partition(" - at `$")
    place = _field_path(content, kind, str(error), at.rstrip("`"))
    if problem.startswith("Object missing required field"):
        field = problem.split("`")[1]
        return f"is not the profiler's, because it lacks {f'{place}.{field}' if place else field}"
    words = [_TYPES.get(name, name) for part in problem.split("`")[1::2] for name in part.split(" | ")]
    if not problem.startswith("Expected") or len(words) < 2:
        return f"is not the profiler's ({problem}{f' in {place}' if place else ''})"
    return f"is not the profiler's, because {place or 'it'} should be {' or '.join(words[:-1])} and is {words[-1]}"


def _field_path(content: Any, kind: type[JsonObject], message: str, path: str) -> str:
    """Returns the path of the wrong field: msgspec's, with the keys of dicts instead of `[...]`. Changes `content`."""
    place, inside = "", content
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.{3})\]", path):
        if index.isdecimal():
            place, inside = f"{place}[{index}]", inside[int(index)]
            continue
        key = name or _wrong_key(inside, content, kind, message)
        place, inside = f"{place}.{key}", inside[key]
    return place.removeprefix(".")


def _wrong_key(inside: dict[str, Any], content: Any, kind: type[JsonObject], message: str) -> str:
    """Returns the key of `inside`, a part of `content`, whose value causes this error. Leaves only that key there."""
    for key, value in list(inside.items()):
        inside.clear()
        inside[key] = value
        try:
            msgspec.convert(content, kind)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            if str(error) == message:
                return key
    raise AssertionError(message)
