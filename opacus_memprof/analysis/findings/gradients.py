# SPDX-License-Identifier: Apache-2.0
"""Finds gradients and noise that are allocated and never used."""

from collections import Counter
from collections.abc import Iterator

from opacus_memprof.analysis.findings.run import Run, common_module, largest
from opacus_memprof.profiles.profile import Finding
from opacus_memprof.profiles.units import format_bytes, format_count

# Phases in which p.grad is what autograd has accumulated. From the phase noise on, it is what the update uses.
_BEFORE_NOISE = ("forward", "backward", "second_backward", "clip")
_COPIES = "create_or_accumulate_grad_sample"


def frozen_per_sample_gradients(run: Run) -> Iterator[Finding]:
    """Finds per-sample gradients of frozen parameters: functorch computes them for all parameters of a module that has
    one to train."""
    for module, fact in run.facts_of("frozen_samples"):
        yield Finding(
            "frozen_per_sample_gradients",
            module,
            fact["bytes"],
            f"functorch computed gradients of {format_count(fact['samples'], 'sample')} for parameters that require "
            f"none: {format_bytes(fact['bytes'])} in every backward pass, dropped when the hook returned",
            'use grad_sample_mode="hooks" where Opacus has a sampler for the layer, or keep the frozen parameters in a '
            "module of their own",
        )


def discarded_gradients(run: Run) -> Iterator[Finding]:
    """Finds p.grad of autograd that nothing reads before add_noise replaces it."""
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
                f"autograd accumulates {format_bytes(sum(built.values()))} of p.grad in backward, which nobody reads: "
                f"clipping uses grad_sample, and add_noise replaces p.grad. {format_bytes(total)} of it lived at the "
                f"peak of {device} ({largest(sizes)})",
                "drop each gradient as it is made: after make_private, for every parameter that is trained, "
                'p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))',
                device=device,
                modules={module: size for module, size in sizes.items() if size},
            )


def copied_per_sample_gradients(run: Run) -> Iterator[Finding]:
    """Finds copies of per-sample gradients: create_or_accumulate_grad_sample copies a grad sampler's result into zeros
    of the same size."""
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
                f"at the peak of {device}, Opacus holds per-sample gradients twice: it copies what its grad sampler "
                f"has returned into new zeros, {format_bytes(size)}",
                "opacus_memprof.clipping.adopt_grad_samples() before training: Opacus then keeps what the sampler has "
                "returned, where a parameter is used once in a forward; or use "
                'grad_sample_mode="flash_clip", which makes neither',
                device=device,
            )


def noise_allocated_twice(run: Run) -> Iterator[Finding]:
    """Finds zeros beside the noise: _generate_noise allocates zeros of the parameter's shape and then, unless std is 0,
    noise of the same shape."""
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
                "zeros that nobody reads, and the noise",
                "in opacus.optimizers.optimizer._generate_noise, make the zeros only where std is 0; or lower what "
                "lives beside the noise, which is largest for the parameter with the most elements",
                device=device,
            )
