# SPDX-License-Identifier: Apache-2.0
"""Memory that grows step by step.

Told by birth, not by differences between steps, which vary with the batch: at the end of the last step, who holds
blocks that many different steps have made? Steady training frees what a step makes by the end of the next one. What is
made once, parameters, optimizer states, workspaces, caches, has one step of birth, or few. A tensor that each step
replaces by a longer one has one step of birth as well, and is not found.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from opacus_memprof.analysis.findings.run import Run, common_module, finding, largest
from opacus_memprof.units import format_bytes

# Blocks of one site (module, category, phase and op of birth) count when they come from this many steps, and from
# this share of the steps that the replay looks at (all but the first two and the last two).
MIN_STEPS = 3
MIN_SHARE = 0.25
# A site that adds to itself in nearly every one of this many steps is reported however small it is: it has no end.
REGULAR_STEPS = 6
REGULAR_SHARE = 0.9
_MARGIN = 4  # kWarmUpSteps + kRecentSteps of csrc/core/replay.h

_REMEDY = {
    "activations": "something keeps the autograd graph of each step: keep loss.item() or loss.detach(), not loss",
    "activation_hooks": "something keeps what Opacus has captured: run forwards that no backward follows under "
    "torch.no_grad() or in model.eval()",
    "per_sample_gradients": "nobody drops the samples' gradients: call optimizer.zero_grad() after each "
    "optimizer.step()",
    "inputs": "something keeps each batch: let go of it at the end of the step",
}
_ANY = (
    "something keeps a tensor of each step: look for lists, dictionaries and attributes that are appended to, and for "
    "objects that refer to each other (gc.collect() at the end of a step frees those)"
)


def growing_memory(run: Run) -> Iterator[dict[str, Any]]:
    for device, replayed in run.replayed.items():
        looked_at = replayed["last_step_end"]["step"] - _MARGIN
        sites: dict[str, list[dict[str, Any]]] = {}
        for residue in replayed["residue"]:
            if residue["steps"] >= max(MIN_STEPS, MIN_SHARE * looked_at):
                sites.setdefault(run.names.public_category(residue["category"]), []).append(residue)
        for category, found in sites.items():
            steps = max(site["steps"] for site in found)
            regular = steps >= max(REGULAR_STEPS, REGULAR_SHARE * looked_at)
            if regular or run.material(device, sum(site["bytes"] for site in found)):
                yield _growth(run, device, category, found, replayed["last_step_end"]["step"] - 1)


def _growth(run: Run, device: str, category: str, found: Sequence[dict[str, Any]], end: int) -> dict[str, Any]:
    modules: dict[str, int] = {}
    for site in found:
        module = run.names.module(site["module"])
        modules[module] = modules.get(module, 0) + site["bytes"]
    total = sum(modules.values())
    first, last = min(site["first_step"] for site in found), max(site["last_step"] for site in found)
    steps = max(site["steps"] for site in found)
    sites = sorted((_site(run, site) for site in found), key=lambda site: -site["bytes"])
    return finding(
        "growing_memory",
        common_module(modules),
        total,
        f"{format_bytes(total)} of {category} that {steps} of the steps {first} to {last} made still lived at the end "
        f"of step {end}: about {format_bytes(total // steps)} more each time ({largest(modules)}); "
        f"made in {_where(sites[0])}",
        _REMEDY.get(category, _ANY),
        device=device,
        category=category,
        modules=modules,
        sites=sites,
    )


def _site(run: Run, residue: dict[str, Any]) -> dict[str, Any]:
    return {
        "module": run.names.module(residue["module"]),
        "phase": run.names.phase(residue["phase"]),
        "op": run.names.op(residue["op"]),
        "bytes": residue["bytes"],
        "blocks": residue["blocks"],
        "steps": residue["steps"],
    }


def _where(site: dict[str, Any]) -> str:
    """Where the largest site's blocks were allocated, in words."""
    op = f" by {site['op']}" if site["op"] else ""
    module = f" of {site['module']}" if site["module"] else ", outside every module"
    return f"{site['phase']}{op}{module}"
