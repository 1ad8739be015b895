# SPDX-License-Identifier: Apache-2.0
"""The structure of meta.json: the names of the ids in events.bin, and the origin of the profile."""

from pathlib import Path
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from opacus_memprof.profiles.json_object import FORMAT, JsonObject, read_json_object
from opacus_memprof.profiles.launch import Launch
from opacus_memprof.profiles.profile import ReservedPeak, VirtualGpus


class NameLists(JsonObject):
    """The names of the ids. A name's id is its index in the list of its kind.

    Attributes:
        components: the component of each module, such as "attention", as hooks recognised it; "" if they did not.
        lines: for each op that stands for lines of the user's own code, the innermost: "train.py:41 in update"; "" for
            others.
    """

    categories: list[str] = []
    phases: list[str] = []
    modules: list[str] = []
    components: list[str] = []
    ops: list[str] = []
    lines: list[str] = []
    threads: list[str] = []
    streams: list[str] = []
    devices: list[str] = []


class Meta(JsonObject):
    """The fields of meta.json that readers need; profiles.profile describes fields that profile.json shares.

    Attributes:
        names: names of the ids in events.bin; those of a killed process may lack the ids of its last events.
        reserved_peaks: by device, as of the time when the file was written.
    """

    format: Literal[1] = FORMAT
    versions: dict[str, str | None] = {}
    virtual: VirtualGpus | UnsetType = UNSET
    command: list[str] = []
    launch: Launch | None = None
    names: NameLists = msgspec.field(default_factory=NameLists)
    reserved_peaks: dict[str, ReservedPeak] = {}


def read_meta(path: Path) -> Meta:
    """Reads meta.json, or returns an empty one without the file. Raises MemprofError if it cannot be read."""
    return read_json_object(path, Meta, "remove it, or profile again") if path.exists() else Meta()
