# SPDX-License-Identifier: Apache-2.0
"""The structure of meta.json: what the numbers in events.bin stand for, and where they come from."""

from pathlib import Path
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from opacus_memprof.profiles.json_object import FORMAT, JsonObject, read_json_object
from opacus_memprof.profiles.launch import Launch
from opacus_memprof.profiles.profile import VirtualGpus


class NameLists(JsonObject):
    """A name's id is its index in the list of its kind.

    Attributes:
        components: what each of `modules` is ("attention"), as hooks have seen it; "" where that does not tell.
    """

    categories: list[str] = []
    phases: list[str] = []
    modules: list[str] = []
    components: list[str] = []
    ops: list[str] = []
    threads: list[str] = []
    streams: list[str] = []
    devices: list[str] = []


class Meta(JsonObject):
    """What readers need of meta.json; profiles.profile describes the fields that profile.json has as well.

    Attributes:
        names: what the ids in events.bin stand for; of a killed process they may be older than its last events.
    """

    format: Literal[1] = FORMAT
    versions: dict[str, str | None] = {}
    virtual: VirtualGpus | UnsetType = UNSET
    command: list[str] = []
    launch: Launch | None = None
    names: NameLists = msgspec.field(default_factory=NameLists)


def read_meta(path: Path) -> Meta:
    """Reads meta.json; without the file, an empty one. Raises MemprofError as read_json_object does."""
    return read_json_object(path, Meta, "remove it, or profile again") if path.exists() else Meta()
