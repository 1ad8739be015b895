# SPDX-License-Identifier: Apache-2.0
"""What the ids in an event file stand for, and bytes by category id as bytes by the names of reports."""

from collections.abc import Mapping, Sequence
from typing import Any

from opacus_memprof.profiles.categories import ACTIVATION_HOOKS, FORWARD_UNDECIDED, PARTS, reported_name


class Names:
    """The names of one profile. A killed process may have left ids that its last meta.json does not name: they
    read like "module 17", and built-in categories and phases always have their names.

    Args:
        meta: meta.json, or {} where there is none.
        replayed: what core.replay returned.
    """

    def __init__(self, meta: Mapping[str, Any], replayed: Mapping[str, Any]) -> None:
        names: Mapping[str, Sequence[str]] = meta.get("names", {})
        builtin: list[str] = replayed["category_names"]
        self._categories = [*builtin, *names.get("categories", [])[len(builtin) :]]
        self._builtin = {reported_name(name) for name in builtin} - {FORWARD_UNDECIDED}
        self._phases: Sequence[str] = replayed["phase_names"]
        self._modules = names.get("modules", [""])
        self._ops = names.get("ops", [""])
        self._streams = names.get("streams", [])
        self._threads = names.get("threads", [])

    def category(self, id: int) -> str:
        return _name(self._categories, id, "category")

    def phase(self, id: int) -> str:
        return _name(self._phases, id, "phase")

    def module(self, id: int) -> str:
        """The module's fully qualified name; "" is no module."""
        return _name(self._modules, id, "module")

    def op(self, id: int) -> str:
        return _name(self._ops, id, "op")

    def stream(self, id: int) -> str:
        return _name(self._streams, id, "stream")

    def thread(self, id: int) -> str:
        return _name(self._threads, id, "thread")

    def device(self, id: int) -> str:
        return "cpu" if id == 0 else f"cuda:{id - 1}"

    def public_category(self, id: int) -> str:
        return reported_name(self.category(id))

    def categories(self, by_id: Sequence[int]) -> dict[str, int]:
        """Bytes by public category, without the categories that have none."""
        result: dict[str, int] = {}
        for id, count in enumerate(by_id):
            if count:
                name = self.public_category(id)
                result[name] = result.get(name, 0) + count
        return result

    def all_categories(self, by_id: Sequence[int]) -> dict[str, int]:
        """Bytes by public category: every built-in one, and the program's own that have any."""
        some = self.categories(by_id)
        names = dict.fromkeys(self.public_category(id) for id in range(len(self._categories)))
        return {name: some.get(name, 0) for name in [*names, *some] if name in self._builtin or name in some}

    def hooks_split(self, by_id: Sequence[int]) -> dict[str, int]:
        """What of activation_hooks autograd holds as well, and what Opacus alone holds."""
        return {share: by_id[self._categories.index(name)] for name, share in PARTS.items()}


def as_without_dp(sizes: Mapping[str, int], shared: int) -> dict[str, int]:
    """Bytes by public category, with the `shared` bytes of captures that autograd holds as well as what they are
    without Opacus: activations."""
    if not shared:
        return dict(sizes)
    activations = sizes.get("activations", 0) + shared
    return {**sizes, ACTIVATION_HOOKS: sizes.get(ACTIVATION_HOOKS, 0) - shared, "activations": activations}


def _name(names: Sequence[str], id: int, kind: str) -> str:
    return names[id] if id < len(names) else f"{kind} {id}"
