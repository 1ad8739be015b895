# SPDX-License-Identifier: Apache-2.0
"""Finds memory that grows step by step.

The evidence is blocks that are live at the end of the last step and that many different steps have allocated.
Differences between steps would vary with the batch. Steady training frees what a step has allocated by the end of the
next one; parameters, optimizer states, workspaces and caches are allocated in one step, or in few. A tensor that each
step replaces by a longer one is allocated in one step too, and is not found.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from opacus_memprof.analysis.findings.run import Run, common_module, largest
from opacus_memprof.profiles.profile import Finding, GrowthSite
from opacus_memprof.profiles.units import format_bytes

# Blocks of one site (the module, category, phase and op of their allocation) count if this many steps, and this share
# of the steps that the replay considers (all but the first two and the last two), have allocated some.
MIN_STEPS = 3
MIN_SHARE = 0.25
# A site that grows in nearly every one of at least this many steps is reported however small it is: it never stops.
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
_DEFAULT_REMEDY = (
    "something keeps a tensor of each step: look for lists, dictionaries and attributes that are appended to, and for "
    "objects that refer to each other (gc.collect() at the end of a step frees those)"
)


def growing_memory(run: Run) -> Iterator[Finding]:
    """Finds categories of blocks that steps leave behind."""
    for device, replayed in run.replayed.items():
        considered = replayed["last_step_end"]["step"] - _MARGIN
        sites: dict[str, list[dict[str, Any]]] = {}
        for residue in replayed["residue"]:
            if residue["steps"] >= max(MIN_STEPS, MIN_SHARE * considered):
                sites.setdefault(run.names.reported_category(residue["category"]), []).append(residue)
        for category, found in sites.items():
            steps = max(site["steps"] for site in found)
            regular = steps >= max(REGULAR_STEPS, REGULAR_SHARE * considered)
            if regular or run.is_material(device, sum(site["bytes"] for site in found)):
                yield _growth(run, device, category, found, replayed["last_step_end"]["step"] - 1)


def _growth(run: Run, device: str, category: str, found: Sequence[dict[str, Any]], end: int) -> Finding:
    modules: dict[str, int] = {}
    for site in found:
        module = run.names.module(site["module"])
        modules[module] = modules.get(module, 0) + site["bytes"]
    total = sum(modules.values())
    first, last = min(site["first_step"] for site in found), max(site["last_step"] for site in found)
    steps = max(site["steps"] for site in found)
    sites = sorted((_site(run, site) for site in found), key=lambda site: -site.bytes)
    return Finding(
        "growing_memory",
        common_module(modules),
        total,
        f"{format_bytes(total)} of {category} that {steps} of the steps {first} to {last} made still lived at the end "
        f"of step {end}: about {format_bytes(total // steps)} more each time ({largest(modules)}); "
        f"made in {_where(sites[0])}",
        _REMEDY.get(category, _DEFAULT_REMEDY),
        device=device,
        category=category,
        modules=modules,
        sites=sites,
    )


def _site(run: Run, residue: dict[str, Any]) -> GrowthSite:
    return GrowthSite(
        module=run.names.module(residue["module"]),
        phase=run.names.phase(residue["phase"]),
        op=run.names.op(residue["op"]),
        bytes=residue["bytes"],
        blocks=residue["blocks"],
        steps=residue["steps"],
    )


def _where(site: GrowthSite) -> str:
    """A phrase for the phase, op and module of a site."""
    op = f" by {site.op}" if site.op else ""
    module = f" of {site.module}" if site.module else ", outside every module"
    return f"{site.phase}{op}{module}"
