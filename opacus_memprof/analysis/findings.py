# SPDX-License-Identifier: Apache-2.0
"""Finds wasted memory of a run, each with its module, bytes, evidence and remedy.

A detector takes a Run and yields findings. `analysis.defects` has the detectors of defects, and the order of all.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opacus_memprof.analysis.events import Names
from opacus_memprof.profiles.layer_shapes import Program
from opacus_memprof.profiles.profile import Device, Finding
from opacus_memprof.profiles.units import format_bytes, format_count

# Findings below this share of the peak are not reported: rounding of blocks and small changes of the batch have larger
# effects.
MATERIAL = 0.01
_OFTEN = 3  # once can be a batch that the program skips


@dataclass(frozen=True)
class Run:
    """One profiled run.

    Attributes:
        devices: devices of profile.json, by name.
        replayed: devices of core.replay, by the same names.
        observations: observations of hooks, with ids of modules.
        names: translates the ids.
        failed: whether an error other than out of memory ended the run.
        program: the names that the program has for its model, optimizer and loader.
    """

    devices: Mapping[str, Device]
    replayed: Mapping[str, Mapping[str, Any]]
    observations: Sequence[Mapping[str, Any]]
    names: Names
    failed: bool = False
    program: Program = field(default_factory=Program)

    def observed(self, kind: str) -> list[tuple[str, Mapping[str, Any]]]:
        """Returns the observations of a kind, with the names of their modules."""
        return [(self.names.module(seen["module"]), seen) for seen in self.observations if seen["kind"] == kind]

    def observed_by_device(self, kind: str) -> Iterator[tuple[Mapping[str, Any], str, Device]]:
        """Yields each observation of a kind with each device."""
        for _, seen in self.observed(kind):
            for device, entry in self.devices.items():
                yield seen, device, entry

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


def some(modules: Sequence[str]) -> str:
    """Lists modules: `fc1, fc2 and 3 more`."""
    shown = [module or "the model itself" for module in modules[:3]]
    return ", ".join(shown) + (f" and {len(modules) - 3} more" if len(modules) > 3 else "")


FREEZE = (
    "freeze {} before make_private with requires_grad_(False), or give the optimizer all parameters that are trained"
)
ZERO_GRAD = "call optimizer.zero_grad() after each optimizer.step()"


def ghost_matrices(run: Run) -> Iterator[Finding]:
    """Finds norm samplers whose T x T matrices are larger than the per-sample gradients that they avoid.

    For a Linear of p outputs and d inputs, B samples of T tokens and s bytes per element, the norm sampler allocates
    s·B·T² bytes three times (twice without a bias), to avoid per-sample gradients of s·B·(p·d + p) bytes.
    """
    observations = run.observed("norm_matrices")
    if not observations:
        return
    sizes = {module: seen["bytes"] for module, seen in observations}
    # A layer frees its matrices before the next layer allocates, so only the largest count.
    _, seen = max(observations, key=lambda named: named[1]["bytes"])
    p, d = seen["features"]
    layers = f", and the same holds for {format_count(len(sizes) - 1, 'more layer')}" if len(sizes) > 1 else ""
    yield Finding(
        "ghost_matrices",
        common_module(sizes),
        seen["bytes"],
        f"T x T matrices take {format_bytes(seen['bytes'])} for "
        f"{format_count(seen['samples'], 'sample')} of {seen['tokens']} tokens; the {p} x {d} per-sample "
        f"gradients that they avoid would take {format_bytes(seen['gradient_bytes'])}{layers} ({largest(sizes)})",
        'use grad_sample_mode="flash_clip", which makes neither, or "hooks", which makes only the gradients',
        gradient_bytes=seen["gradient_bytes"],
        modules=sizes,
    )


# In these phases p.grad is the sum that autograd accumulated. From noise on, it is the gradient of the update.
_BEFORE_NOISE = ("forward", "backward", "second_backward", "clip")
_COPIES = "create_or_accumulate_grad_sample"


def frozen_per_sample_gradients(run: Run) -> Iterator[Finding]:
    """Finds per-sample gradients of frozen parameters, which functorch computes besides those of trainable ones."""
    for module, seen in run.observed("frozen_samples"):
        if seen["mode"] == "functorch":
            why = ""
            remedy = 'use grad_sample_mode="hooks" where Opacus has a sampler for the layer, or'
        else:
            why = f" Opacus has no sampler for {seen['layer']}, and uses functorch for it and all inside of it"
            remedy = f"opacus.grad_sample.register_grad_sampler({seen['layer']}) gives it a sampler; or"
        yield Finding(
            "frozen_per_sample_gradients",
            module,
            seen["bytes"],
            f"functorch computed gradients of {format_count(seen['samples'], 'sample')} for frozen "
            f"parameters: {format_bytes(seen['bytes'])} in every backward pass, freed when the hook returned"
            f"{'.' * bool(why)}{why}",
            f"{remedy} keep the frozen parameters in a module of their own",
        )


def discarded_gradients(run: Run) -> Iterator[Finding]:
    """Finds gradients that autograd accumulates in p.grad and add_noise replaces unread."""
    built = {module: int(seen["bytes"]) for module, seen in run.observed("replaced_gradients")}
    for device, entry in run.devices.items():
        peak = entry.peak
        if peak.phase in _BEFORE_NOISE:
            live = {module: categories.get("gradients", 0) for module, categories in peak.modules.items()}
            sizes = {module: min(size, live.get(module, 0)) for module, size in built.items()}
            total = sum(sizes.values())
        elif peak.phase == "noise":  # then gradients include noisy ones
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
    if run.failed:  # another finding, or none, explains the failure
        return
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


def unused_per_sample_gradients(run: Run) -> Iterator[Finding]:
    """Finds per-sample gradients that zero_grad clears again and again before any step has used them."""
    observations = run.observed("unused_samples")
    times = max((seen["bytes"] for _, seen in run.observed("unused_passes")), default=0)
    sizes = {module: seen["bytes"] for module, seen in observations}
    total = sum(sizes.values())
    if times < _OFTEN or run.failed or not any(run.is_material(device, total) for device in run.devices):
        return
    yield Finding(
        "unused_per_sample_gradients",
        common_module(sizes),
        total,
        f"{times} times, zero_grad cleared per-sample gradients that no step had used, {format_bytes(total)} at most "
        f"({largest(sizes)}): a backward pass of another model's loss, such as a generator's, computes them too",
        "call disable_hooks() of the model that make_private returned before such a pass, and enable_hooks() after "
        "it: Opacus then neither captures activations nor computes per-sample gradients",
        modules=sizes,
    )


def per_sample_gradients_in_forward(run: Run) -> Iterator[Finding]:
    """Finds per-sample gradients of an earlier step that were live at a peak in a forward pass or an evaluation."""
    if run.observed("unowned_samples") or run.observed("public_steps") or not run.observed("zero_grads"):
        return
    for device, entry in run.devices.items():
        peak = entry.peak
        live = {module: categories.get("per_sample_gradients", 0) for module, categories in peak.modules.items()}
        size = peak.categories.get("per_sample_gradients", 0)
        if peak.phase in ("forward", "idle") and run.is_material(device, size):
            yield Finding(
                "per_sample_gradients_in_forward",
                common_module(module for module, bytes in live.items() if bytes),
                size,
                f"the peak of {device} is in a forward pass or an evaluation, where {format_bytes(size)} of per-sample "
                f"gradients of an earlier step were still live ({largest(live)})",
                "call optimizer.zero_grad() directly after optimizer.step(), and not before the next backward pass",
                device=device,
            )


def per_sample_gradients_by_hand(run: Run) -> Iterator[Finding]:
    """Finds per-sample gradients that the program computes itself, by torch.func."""
    for seen, device, entry in run.observed_by_device("samples_by_hand"):
        categories = entry.peak.categories
        size = sum(categories.get(name, 0) for name in ("unattributed", "backward_temporaries", "gradients"))
        if run.is_material(device, min(seen["bytes"], size)) and 2 * size > seen["bytes"]:
            yield Finding(
                "per_sample_gradients_by_hand",
                "",
                seen["bytes"],
                f"vmap(grad(...)) computes the gradients of {format_count(seen['samples'], 'sample')} at once, "
                f"{format_bytes(seen['bytes'])}, and {format_bytes(size)} of gradients and what is computed from "
                f"them were live at the peak of {device}",
                BY_PARTS,
                device=device,
            )


BY_PARTS = (
    "compute, clip and add up the gradients of a part of the batch at a time, then add noise and step once; or train "
    'with opacus_memprof.PrivacyEngine and grad_sample_mode="flash_clip", which forms no per-sample gradients'
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
            module = next((name for name, seen in run.observed("largest_parameter") if seen["bytes"] == size), "")
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
    sharded = run.observed("sharded_parameter")
    if not sharded:
        return
    module, largest = max(sharded, key=lambda named: named[1]["bytes"])
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
    if not run.observed("gradients_reduced"):
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
