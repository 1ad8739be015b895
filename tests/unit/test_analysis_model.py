# SPDX-License-Identifier: Apache-2.0
"""Profiles of random event files against a model that looks at every instant of every block's life anew."""

import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from event_files import PHASES, EventFile, unix_ns
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_memprof.analysis.profile import build_profile

HOOKS = {"activation_hooks_shared", "activation_hooks_opacus_only"}
OWN_PHASES = {
    "backward_temporaries": {"backward", "second_backward"},
    "optimizer_temporaries": {"optimizer_step"},
}
PROVISIONAL = {"temp_matrices", "clipping_temporaries", "unattributed", *OWN_PHASES}
HELD = {"forward_undecided", *HOOKS}
TAGS = ["gradients", "teacher", *HELD, *PROVISIONAL]


@dataclass
class Life:
    """A block: what its alloc event said, and its category from each alloc or retag event on."""

    size: int
    phase: str
    step: int
    birth: int
    tags: dict[int, str]
    death: int | None = None
    freed: dict[str, Any] = field(default_factory=dict)

    def lives(self, event: int) -> bool:
        return self.birth <= event and (self.death is None or event < self.death)

    def tagged_at(self, event: int) -> int:
        return max(since for since in self.tags if since <= event)


@dataclass
class Model:
    """One device's events as they were drawn."""

    events: list[dict[str, Any]]
    lives: list[Life]
    closed: bool

    def category(self, life: Life, event: int) -> str:
        """The public name that the block's bytes have at an instant."""
        tag = life.tags[life.tagged_at(event)]
        through = self.events[life.birth + 1 : life.death]
        failed = any(passed["kind"] == "oom" for passed in through)
        if tag in HOOKS:
            return "activation_hooks"
        if tag == "forward_undecided":
            freed_in_forward = life.freed.get("phase") == "forward" and life.freed.get("step") == life.step
            captured = HOOKS & set(life.tags.values())
            return "forward_temporaries" if freed_in_forward and not captured and not failed else "activations"
        first, *later = life.tags.values()
        if tag in PROVISIONAL and first in PROVISIONAL and later and later[0] not in PROVISIONAL | HELD:
            return later[0]
        if tag in OWN_PHASES and not later and not failed:
            left = any(
                passed["kind"] == "step" or (passed["kind"] == "phase" and passed["phase"] not in OWN_PHASES[tag])
                for passed in through
            )
            if left or (life.death is None and self.closed):
                return "unattributed"
        return tag

    def module(self, life: Life, event: int) -> str:
        """Returns the block's module, which a retag sets from then on, as the alloc event did.

        Without one, the first module that the block ever has counts.
        """
        named = {since: str(self.events[since]["module"]) for since in life.tags}
        return named[life.tagged_at(event)] or next((name for name in named.values() if name), "")

    def bytes(self, event: int) -> int:
        return sum(life.size for life in self.lives if life.lives(event))

    def first_highest(self, events: list[int]) -> int:
        return max(events, key=lambda event: (self.bytes(event), -event))

    def sizes(self, event: int, key: Any) -> dict[Any, int]:
        """Live bytes by key(block, instant), at the last instant before another block comes or goes."""
        while event + 1 < len(self.events) and self.events[event + 1]["kind"] not in ("alloc", "free"):
            event += 1
        total: Counter[Any] = Counter()
        for life in self.lives:
            if life.lives(event):
                total[key(life, event)] += life.size
        return {name: size for name, size in total.items() if size}


@st.composite
def runs(draw: st.DrawFn) -> tuple[EventFile, Model]:
    file = EventFile(closed=draw(st.booleans()))
    events: list[dict[str, Any]] = []
    lives: list[Life] = []
    step = 0
    kinds = ["alloc"] * 5 + ["free"] * 3 + ["retag"] * 3 + ["phase", "step", "oom"]
    for index, kind in enumerate(["alloc", *draw(st.lists(st.sampled_from(kinds), max_size=60))]):
        where = {"phase": draw(st.sampled_from(PHASES)), "step": step, "module": draw(st.sampled_from(["", "a", "b"]))}
        live = [life for life in lives if life.death is None]
        if kind in ("free", "retag") and not live:
            kind = "phase"
        if kind == "alloc":
            size, tag = draw(st.integers(1, 1000)), draw(st.sampled_from(TAGS))
            lives.append(Life(size, where["phase"], step, index, {index: tag}))
            file.add("alloc", 64 * len(lives), size, tag, **where)
        elif kind in ("free", "retag"):
            life = draw(st.sampled_from(live))
            address, last = 64 * (lives.index(life) + 1), list(life.tags.values())[-1]
            if kind == "free":
                life.death, life.freed = index, where
                file.add("free", address, category=last, **where)
            else:
                of_forward = life.tags[life.birth] in {"forward_undecided", *HOOKS}  # nothing else becomes undecided
                life.tags[index] = draw(st.sampled_from(TAGS if of_forward else TAGS[1:]))
                file.retag(address, last, life.tags[index], **where)
        else:
            step = where["step"] = step + (kind == "step")
            file.add(kind, size=step, **where)
        events.append({"kind": kind, **where})
    return file, Model(events, lives, file.closed)


def flat(nested: dict[str, dict[str, int]]) -> dict[tuple[str, str], int]:
    return {(outer, inner): size for outer, sizes in nested.items() for inner, size in sizes.items()}


@settings(max_examples=60, deadline=None)
@given(runs())
def test_profiles_agree_with_the_model(run: tuple[EventFile, Model]) -> None:
    file, model = run
    with tempfile.TemporaryDirectory() as directory:
        profile = build_profile(file.write(Path(directory)), status="finished", exit_code=0)
    assert profile["warnings"] == []
    device = profile["devices"]["cuda:0"]
    every = list(range(len(model.events)))

    peak, highest = device["peak"], model.first_highest(every)
    assert (peak["event"], peak["requested_bytes"]) == (highest, model.bytes(highest))
    assert (peak["step"], peak["phase"]) == (model.events[highest]["step"], model.events[highest]["phase"])
    assert peak["unix_ns"] == unix_ns(highest)
    assert {name: size for name, size in peak["categories"].items() if size} == model.sizes(highest, model.category)
    assert sum(peak["categories"].values()) == peak["requested_bytes"]
    assert flat(peak["born_in"]) == model.sizes(highest, lambda life, at: (life.phase, model.category(life, at)))
    assert flat(peak["modules"]) == model.sizes(
        highest, lambda life, at: (model.module(life, at), model.category(life, at))
    )
    assert (
        sorted(block["bytes"] for block in peak["largest_blocks"])
        == sorted(life.size for life in model.lives if life.lives(highest))[-50:]
    )

    for name in PHASES:
        inside = [event for event in every if model.events[event]["phase"] == name]
        assert (name in device["phases"]) == bool(inside)
        if inside:
            moment, event = device["phases"][name], model.first_highest(inside)
            assert (moment["event"], moment["peak_bytes"]) == (event, model.bytes(event))
            assert moment["categories"] == model.sizes(event, model.category)

    for row in device["steps"]:
        inside = [event for event in every if model.events[event]["step"] == row["step"]]
        event = model.first_highest(inside)
        assert (row["event"], row["peak_bytes"]) == (event, model.bytes(event))
        assert row["end_bytes"] == model.bytes(inside[-1])
        assert row["categories"] == model.sizes(event, model.category)
    assert [row["step"] for row in device["steps"]] == sorted({event["step"] for event in model.events})

    timeline = device["timeline"]
    assert timeline["event"] == every
    for event in every:
        at_once = {name: sizes[event] for name, sizes in timeline["categories"].items() if sizes[event]}
        assert at_once == model.sizes(event, model.category)
    assert len(device["out_of_memory"]) == sum(event["kind"] == "oom" for event in model.events)
