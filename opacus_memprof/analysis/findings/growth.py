# SPDX-License-Identifier: Apache-2.0
"""Memory that grows step by step.

Told by birth, not by differences between steps, which vary with the batch: at the end of the last step, who holds
blocks that many different steps have made? Steady training frees what a step makes by the end of the next one. What is
made once, parameters, optimizer states, workspaces, caches, has one step of birth, or few. A tensor that each step
replaces by a longer one has one step of birth as well, and is not found.
"""

from collections.abc import Iterator
from typing import Any

from opacus_memprof.analysis.findings.run import Run, common_module, finding, largest
from opacus_memprof.units import format_bytes

# Blocks of one module and category count when they come from this many steps, and from this share of the steps that
# the replay looks at (all but the first two and the last two).
MIN_STEPS = 3
MIN_SHARE = 0.25
_MARGIN = 4  # kWarmUpSteps + kRecentSteps of csrc/core/replay.h

_REMEDY = {
    "activations": "something keeps the autograd graph of each step: keep loss.item() or loss.detach(), not loss",
    "inputs": "something keeps each batch: let go of it at the end of the step",
}
_ANY = "something keeps a tensor of each step: look for lists, dictionaries and attributes that are appended to"


def growing_memory(run: Run) -> Iterator[dict[str, Any]]:
    for device, replayed in run.replayed.items():
        looked_at = replayed["last_step_end"]["step"] - _MARGIN
        rows: dict[str, list[dict[str, Any]]] = {}
        for residue in replayed["residue"]:
            if residue["steps"] >= max(MIN_STEPS, MIN_SHARE * looked_at):
                rows.setdefault(run.names.public_category(residue["category"]), []).append(residue)
        for category, found in rows.items():
            sizes: dict[str, int] = {}
            for residue in found:
                module = run.names.module(residue["module"])
                sizes[module] = sizes.get(module, 0) + residue["bytes"]
            total = sum(sizes.values())
            if not run.material(device, total):
                continue
            first, last = min(one["first_step"] for one in found), max(one["last_step"] for one in found)
            steps = max(one["steps"] for one in found)
            yield finding(
                "growing_memory",
                common_module(sizes),
                total,
                f"{format_bytes(total)} of {category} that {steps} of the steps {first} to {last} made still lived at "
                f"the end of step {replayed['last_step_end']['step'] - 1}: about {format_bytes(total // steps)} more "
                f"each time ({largest(sizes)})",
                _REMEDY.get(category, _ANY),
                device=device,
                category=category,
                modules=sizes,
            )
