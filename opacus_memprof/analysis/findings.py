# SPDX-License-Identifier: Apache-2.0
"""Finds defects of a run that a user can fix, each with its module, bytes, evidence and remedy.

A detector takes a Run and yields findings. `find` applies all detectors, in the order of DETECTORS.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opacus_memprof.analysis.names import Names
from opacus_memprof.profiles.profile import Device, Finding, GrowthSite
from opacus_memprof.profiles.units import format_bytes, format_count

# Findings below this share of the peak are not reported: rounding of blocks and small changes of the batch take more.
MATERIAL = 0.01


@dataclass(frozen=True)
class Run:
    """One profiled run.

    Attributes:
        devices: devices of profile.json, by name.
        replayed: devices of core.replay, by the same names.
        facts: facts that hooks recorded (hook_facts.recorded()), with ids of modules.
        names: translates the ids.
    """

    devices: Mapping[str, Device]
    replayed: Mapping[str, Mapping[str, Any]]
    facts: Sequence[Mapping[str, Any]]
    names: Names

    def facts_of(self, kind: str) -> list[tuple[str, Mapping[str, Any]]]:
        """Returns the facts of a kind, with the names of their modules."""
        return [(self.names.module(fact["module"]), fact) for fact in self.facts if fact["kind"] == kind]

    def is_material(self, device: str, size: int) -> bool:
        """Returns whether `size` bytes are at least MATERIAL of the device's peak."""
        return size > 0 and size >= MATERIAL * self.devices[device].peak.requested_bytes


def common_module(modules: Iterable[str]) -> str:
    """Returns the innermost module that contains all modules; "" is the model itself."""
    paths = [module.split(".") for module in modules]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def largest(sizes: Mapping[str, int], count: int = 3) -> str:
    """Formats the largest modules and their bytes: `fc1 2.00 MiB, fc2 1.00 MiB, 3 more`."""
    rows = sorted(((size, name) for name, size in sizes.items() if size), key=lambda row: (-row[0], row[1]))
    shown = [f"{name or '(no module)'} {format_bytes(size)}" for size, name in rows[:count]]
    more = [f"{len(rows) - count} more"] if len(rows) > count else []
    return ", ".join([*shown, *more])


_EVALUATE = (
    "run forward passes without a backward pass under torch.no_grad() or in model.eval(); to continue after one, "
    "delete `module.activations` and set `parameter._forward_counter` to 0, because zero_grad does neither"
)
_CHECKPOINT = (
    "checkpoint with use_reentrant=True, which Opacus supports, or train without checkpointing: Opacus captures in the "
    "forward pass and again in the recomputation, and backward releases only one of the two"
)


def captures_without_backward(run: Run) -> Iterator[Finding]:
    """Finds captured activations that no backward pass released in several forward passes, or before a failed step."""
    facts = run.facts_of("captures")
    if not facts:
        return
    captured = {module: fact for module, fact in facts if fact["captures"]}
    sizes = {module: fact["bytes"] for module, fact in facts if fact["bytes"]}
    total = sum(sizes.values())
    count = sum(fact["captures"] for fact in captured.values())
    checkpointing = any(fact["recomputed"] for fact in captured.values())
    failed = any(fact["failed"] for fact in captured.values())
    if any(fact["refused"] for fact in captured.values()):
        consequence = "the next ghost-clipping forward fails, with an error about tied parameters"
    elif failed:
        consequence = "the step failed, because grad_sample stays None until every capture has had its backward pass"
    else:
        consequence = "the next optimizer step will fail, because grad_sample stays None"
    places = format_count(len(captured), "module")
    yield Finding(
        "checkpoint_captures" if checkpointing else "captures_without_backward",
        common_module(captured),
        total,
        f"{count} captures in {places} wait for a backward pass that never came, and keep {format_bytes(total)} of "
        f"activations alive ({largest(sizes)}); {consequence}",
        _CHECKPOINT if checkpointing else _EVALUATE,
        captures={module: fact["captures"] for module, fact in captured.items()},
        modules=sizes,
    )


def ghost_matrices(run: Run) -> Iterator[Finding]:
    """Finds norm samplers whose T x T matrices are larger than the per-sample gradients that they avoid.

    For a Linear of p outputs and d inputs, B samples of T tokens and s bytes per element, the norm sampler allocates
    s·B·T² bytes three times (twice without a bias), to avoid per-sample gradients of s·B·(p·d + p) bytes.
    """
    facts = run.facts_of("norm_matrices")
    if not facts:
        return
    sizes = {module: fact["bytes"] for module, fact in facts}
    # A layer frees its matrices before the next layer allocates, so only the largest count.
    _, fact = max(facts, key=lambda named_fact: named_fact[1]["bytes"])
    p, d = fact["features"]
    layers = f", and the same holds for {format_count(len(sizes) - 1, 'more layer')}" if len(sizes) > 1 else ""
    yield Finding(
        "ghost_matrices",
        common_module(sizes),
        fact["bytes"],
        f"T x T matrices take {format_bytes(fact['bytes'])} for "
        f"{format_count(fact['samples'], 'sample')} of {fact['tokens']} tokens; the {p} x {d} per-sample "
        f"gradients that they avoid would take {format_bytes(fact['gradient_bytes'])}{layers} ({largest(sizes)})",
        'use grad_sample_mode="flash_clip", which makes neither, or "hooks", which makes only the gradients',
        gradient_bytes=fact["gradient_bytes"],
        modules=sizes,
    )


def stale_norm_samples(run: Run) -> Iterator[Finding]:
    """Finds Linear layers whose norm sampler returns no norms, because the outputs have more than three dimensions."""
    for module, fact in run.facts_of("norms_missing"):
        what = "the layer keeps those of an earlier batch" if fact["bytes"] else "clipping fails"
        yield Finding(
            "stale_norm_samples",
            module,
            fact["bytes"],
            f"Opacus computes no norms for outputs of {fact['dimensions']} dimensions: {what}. The "
            "layer's part of a sample's gradient is not bounded by max_grad_norm, and the privacy guarantee does not "
            "hold",
            'flatten all dimensions between the first and the last before this layer, or use grad_sample_mode="hooks"',
        )


# In these phases p.grad is the sum that autograd accumulated. From noise on, it is the gradient of the update.
_BEFORE_NOISE = ("forward", "backward", "second_backward", "clip")
_COPIES = "create_or_accumulate_grad_sample"


def frozen_per_sample_gradients(run: Run) -> Iterator[Finding]:
    """Finds per-sample gradients of frozen parameters, which functorch computes beside those of trainable ones."""
    for module, fact in run.facts_of("frozen_samples"):
        yield Finding(
            "frozen_per_sample_gradients",
            module,
            fact["bytes"],
            f"functorch computed gradients of {format_count(fact['samples'], 'sample')} for frozen "
            f"parameters: {format_bytes(fact['bytes'])} in every backward pass, freed when the hook returned",
            'use grad_sample_mode="hooks" where Opacus has a sampler for the layer, or keep the frozen parameters in a '
            "module of their own",
        )


def discarded_gradients(run: Run) -> Iterator[Finding]:
    """Finds gradients that autograd accumulates in p.grad and add_noise replaces unread."""
    built = {module: int(fact["bytes"]) for module, fact in run.facts_of("replaced_gradients")}
    for device, entry in run.devices.items():
        peak = entry.peak
        if peak.phase in _BEFORE_NOISE:
            live = {module: categories.get("gradients", 0) for module, categories in peak.modules.items()}
            sizes = {module: min(size, live.get(module, 0)) for module, size in built.items()}
            total = sum(sizes.values())
        elif peak.phase == "noise":  # gradients include those with noise already
            total = min(peak.born_in.get("backward", {}).get("gradients", 0), sum(built.values()))
            sizes = built
        else:
            continue
        if run.is_material(device, total):
            yield Finding(
                "discarded_gradients",
                common_module(built),
                total,
                f"autograd accumulates {format_bytes(sum(built.values()))} of p.grad in backward, which is never "
                f"read: clipping uses grad_sample, and add_noise replaces p.grad. {format_bytes(total)} of it was live "
                f"at the peak of {device} ({largest(sizes)})",
                "free each gradient as soon as it is accumulated: after make_private, for every trainable parameter, "
                'p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))',
                device=device,
                modules={module: size for module, size in sizes.items() if size},
            )


def copied_per_sample_gradients(run: Run) -> Iterator[Finding]:
    """Finds per-sample gradients that create_or_accumulate_grad_sample copies into zeros of the same size."""
    for device, entry in run.devices.items():
        peak = entry.peak
        gradients = [block for block in peak.newest_blocks if block.category == "per_sample_gradients"]
        results = Counter(block.bytes for block in gradients if block.op != _COPIES)
        copies = [block for block in gradients if block.op == _COPIES and results[block.bytes]]
        size = sum(block.bytes for block in copies)
        if peak.phase == "backward" and run.is_material(device, size):
            yield Finding(
                "copied_per_sample_gradients",
                copies[0].module,
                size,
                f"at the peak of {device}, Opacus holds per-sample gradients twice: it copies the grad sampler's "
                f"result into new zeros, {format_bytes(size)}",
                "call opacus_memprof.clipping.adopt_grad_samples() before training, and Opacus keeps the sampler's "
                "result if a parameter is used once in a forward pass; or use "
                'grad_sample_mode="flash_clip", which allocates neither',
                device=device,
            )


def noise_allocated_twice(run: Run) -> Iterator[Finding]:
    """Finds the zeros that _generate_noise allocates before noise of the same shape, and needs only if std is 0."""
    for device, entry in run.devices.items():
        newest = entry.peak.newest_blocks[:2]
        drawn = [block for block in newest if (block.category, block.op) == ("noise", "_generate_noise")]
        if entry.peak.phase != "noise" or len(drawn) < 2 or drawn[0].bytes != drawn[1].bytes:
            continue
        size = drawn[1].bytes
        if run.is_material(device, size):
            module = next((name for name, fact in run.facts_of("largest_parameter") if fact["bytes"] == size), "")
            yield Finding(
                "noise_allocated_twice",
                module,
                size,
                f"the peak of {device} is in add_noise, where the last two blocks have {format_bytes(size)} each: "
                "zeros that are never read, and the noise",
                "in opacus.optimizers.optimizer._generate_noise, allocate the zeros only if std is 0; or reduce what "
                "is live beside the noise of the parameter with the most elements",
                device=device,
            )


def noise_of_whole_parameters(run: Run) -> Iterator[Finding]:
    """Finds noise for whole parameters under FSDP: _generate_noise uses the shape of the DTensor, not of the shard."""
    sharded = run.facts_of("sharded_parameter")
    if not sharded:
        return
    module, largest = max(sharded, key=lambda named_fact: named_fact[1]["bytes"])
    whole, shard = int(largest["bytes"]), int(largest["shard_bytes"])
    for device in run.devices:
        if run.is_material(device, 2 * (whole - shard)):
            yield Finding(
                "noise_of_whole_parameters",
                module,
                2 * (whole - shard),
                f"add_noise allocates zeros and noise for a whole parameter on every rank of {device}: "
                f"{format_bytes(2 * whole)} for the largest one, of which this rank holds {format_bytes(shard)}",
                "in opacus.optimizers.optimizer._generate_noise, draw the noise for reference.to_local() if the "
                "reference is a DTensor, from a generator with a different seed on each rank",
                device=device,
                parameter_bytes=whole,
                shard_bytes=shard,
            )


def gradients_reduced_twice(run: Run) -> Iterator[Finding]:
    """Finds DDP's buckets for gradients that Opacus' optimizer reduces again."""
    if not run.facts_of("gradients_reduced"):
        return
    for device, entry in run.devices.items():
        size = entry.peak.ops.get("DistributedDataParallel", {}).get("communication", 0)
        if run.is_material(device, size):
            yield Finding(
                "gradients_reduced_twice",
                "",
                size,
                f"DistributedDataParallel reduces p.grad in every backward pass, and Opacus' optimizer reduces the "
                f"gradients again after adding noise: DDP's buckets took {format_bytes(size)} at the peak of "
                f"{device}",
                "wrap the model in opacus.distributed.DifferentiallyPrivateDistributedDataParallel instead of "
                "torch's DistributedDataParallel: the result is the same, without buckets",
                device=device,
            )


# Memory grows if many different steps allocated blocks at one site (module, category, phase and op) that are live at
# the end of the last step. Differences between steps would vary with the batch. In steady training, a step's blocks
# are freed by the end of the next step, and parameters, optimizer states, workspaces and caches are allocated in few
# steps. A tensor that each step replaces by a longer one is allocated in one step too, and is not found.

# A site counts if this many steps, and this share of the steps that the replay considers (all but the first two and the
# last two), allocated blocks there.
MIN_STEPS = 3
MIN_SHARE = 0.25
# A site that grows in nearly every one of at least this many steps is reported however small it is: it never stops.
REGULAR_STEPS = 6
REGULAR_SHARE = 0.9
_MARGIN = 4  # kWarmUpSteps + kRecentSteps of csrc/core/replay.h

_REMEDY = {
    "activations": "something keeps the autograd graph of each step: keep loss.item() or loss.detach(), not loss",
    "activation_hooks": "something keeps the activations that Opacus captured: run forward passes without a backward "
    "pass under torch.no_grad() or in model.eval()",
    "per_sample_gradients": "per-sample gradients are never freed: call optimizer.zero_grad() after each "
    "optimizer.step()",
    "inputs": "something keeps each batch: delete its references at the end of the step",
}
_DEFAULT_REMEDY = (
    "something keeps a tensor of each step: look for lists, dictionaries and attributes that grow, and for "
    "reference cycles (gc.collect() at the end of a step frees those)"
)


def growing_memory(run: Run) -> Iterator[Finding]:
    """Finds categories of which many steps left blocks behind."""
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
        f"{format_bytes(total)} of {category} from {steps} of the steps {first} to {last} were still live at the end "
        f"of step {end}: about {format_bytes(total // steps)} more each time ({largest(modules)}); "
        f"allocated in {_where(sites[0])}",
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
    """Formats a site: `backward by aten::mm of fc1`."""
    op = f" by {site.op}" if site.op else ""
    module = f" of {site.module}" if site.module else ", outside every module"
    return f"{site.phase}{op}{module}"


# Defects that make a run fail or break its privacy guarantee come first.
DETECTORS: tuple[Callable[[Run], Iterator[Finding]], ...] = (
    stale_norm_samples,
    captures_without_backward,
    growing_memory,
    frozen_per_sample_gradients,
    discarded_gradients,
    copied_per_sample_gradients,
    noise_allocated_twice,
    noise_of_whole_parameters,
    gradients_reduced_twice,
    ghost_matrices,
)


def find(run: Run) -> list[Finding]:
    """Returns all findings in the order of DETECTORS; of each detector, the largest first."""
    return [
        finding
        for detector in DETECTORS
        for finding in sorted(detector(run), key=lambda finding: (-finding.bytes, finding.module))
    ]
