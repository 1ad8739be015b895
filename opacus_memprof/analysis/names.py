# SPDX-License-Identifier: Apache-2.0
"""Translates the ids of an event file to names, and bytes by category id to bytes by reported category."""

from collections.abc import Mapping, Sequence
from typing import Any

from opacus_memprof.profiles.categories import ACTIVATION_HOOKS, FORWARD_UNDECIDED, PARTS, reported_name
from opacus_memprof.profiles.meta import NameLists
from opacus_memprof.profiles.profile import HookedActivations


class Names:
    """The names of one profile.

    Ids that the last meta.json of a killed process does not name become "module 17". Built-in categories and phases
    always have names.

    Args:
        names: the names of meta.json, or native.names().
        replayed: the result of core.replay.

    Attributes:
        components: module → the component that hooks recognised, or "".
    """

    def __init__(self, names: NameLists, replayed: Mapping[str, Any]) -> None:
        builtin: list[str] = replayed["category_names"]
        self._categories = [*builtin, *names.categories[len(builtin) :]]
        self._builtin = {reported_name(name) for name in builtin} - {FORWARD_UNDECIDED}
        self._phases: Sequence[str] = replayed["phase_names"]
        self._modules = names.modules or [""]  # id 0 is none
        self.components = dict(zip(names.modules, names.components, strict=False))
        self._ops = names.ops or [""]
        self._lines = names.lines
        self._streams = names.streams
        self._threads = names.threads

    def category(self, id: int) -> str:
        return _name(self._categories, id, "category")

    def phase(self, id: int) -> str:
        return _name(self._phases, id, "phase")

    def module(self, id: int) -> str:
        """Returns the module's fully qualified name; "" means no module."""
        return _name(self._modules, id, "module")

    def op(self, id: int) -> str:
        return _name(self._ops, id, "op")

    def find_op(self, name: str) -> int | None:
        """Returns the id of an op; None if the profile has none of that name."""
        return self._ops.index(name) if name in self._ops else None

    def is_line(self, id: int) -> bool:
        """Returns whether the op stands for lines of the user's own code, `innermost < its caller < ...`."""
        return id < len(self._lines) and self._lines[id] != ""

    def stream(self, id: int) -> str:
        return _name(self._streams, id, "stream")

    def thread(self, id: int) -> str:
        return _name(self._threads, id, "thread")

    def device(self, id: int) -> str:
        return "cpu" if id == 0 else f"cuda:{id - 1}"

    def reported_category(self, id: int) -> str:
        return reported_name(self.category(id))

    def categories(self, by_id: Sequence[int]) -> dict[str, int]:
        """Returns bytes by reported category, from bytes by category id, without empty categories."""
        result: dict[str, int] = {}
        for id, count in enumerate(by_id):
            if count:
                name = self.reported_category(id)
                result[name] = result.get(name, 0) + count
        return result

    def all_categories(self, by_id: Sequence[int]) -> dict[str, int]:
        """Returns bytes by reported category: all built-in ones, and the program's own that have bytes."""
        nonzero = self.categories(by_id)
        names = dict.fromkeys(self.reported_category(id) for id in range(len(self._categories)))
        return {name: nonzero.get(name, 0) for name in [*names, *nonzero] if name in self._builtin or name in nonzero}

    def hooked_activations(self, by_id: Sequence[int]) -> HookedActivations:
        """Returns the two parts of the category activation_hooks, from bytes by category id."""
        return HookedActivations(**{part: by_id[self._categories.index(name)] for name, part in PARTS.items()})


def as_without_dp(sizes: Mapping[str, int], shared: int) -> dict[str, int]:
    """Returns the bytes by reported category that a run without Opacus would have.

    The `shared` bytes of captures, which autograd holds too, count as activations.
    """
    if not shared:
        return dict(sizes)
    activations = sizes.get("activations", 0) + shared
    return {**sizes, ACTIVATION_HOOKS: sizes.get(ACTIVATION_HOOKS, 0) - shared, "activations": activations}


def _name(names: Sequence[str], id: int, kind: str) -> str:
    return names[id] if id < len(names) else f"{kind} {id}"
