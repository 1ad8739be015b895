# SPDX-License-Identifier: Apache-2.0
"""Gradients and noise that are made and never used."""

from collections.abc import Iterator
from typing import Any

from opacus_memprof.analysis.findings.run import Run, common_module, finding, largest
from opacus_memprof.units import format_bytes

# Before these, a p.grad is what autograd made of it; from noise on, it is what the update uses.
_BEFORE_NOISE = ("forward", "backward", "second_backward", "clip")


def frozen_per_sample_gradients(run: Run) -> Iterator[dict[str, Any]]:
    """functorch computes per-sample gradients for every parameter of a module that has one to train."""
    for module, fact in run.noted("frozen_samples"):
        yield finding(
            "frozen_per_sample_gradients",
            module,
            fact["bytes"],
            f"functorch computed gradients of {fact['samples']} samples for parameters that require none: "
            f"{format_bytes(fact['bytes'])} in every backward pass, dropped when the hook returned",
            'use grad_sample_mode="hooks" where Opacus has a sampler for the layer, or keep the frozen parameters in a '
            "module of their own",
        )


def discarded_gradients(run: Run) -> Iterator[dict[str, Any]]:
    """Autograd fills p.grad, nobody reads it, and add_noise puts another tensor in its place."""
    built = {module: int(fact["bytes"]) for module, fact in run.noted("replaced_gradients")}
    for device, entry in run.devices.items():
        peak = entry["peak"]
        if peak["phase"] in _BEFORE_NOISE:
            live = {module: categories.get("gradients", 0) for module, categories in peak["modules"].items()}
            sizes = {module: min(size, live.get(module, 0)) for module, size in built.items()}
            total = sum(sizes.values())
        elif peak["phase"] == "noise":  # here noised gradients are among them
            total = min(peak["born_in"].get("backward", {}).get("gradients", 0), sum(built.values()))
            sizes = built
        else:
            continue
        if run.material(device, total):
            yield finding(
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


def noise_allocated_twice(run: Run) -> Iterator[dict[str, Any]]:
    """_generate_noise makes zeros of the parameter's shape and then, for any std but 0, noise of the same shape."""
    for device, entry in run.devices.items():
        newest = entry["peak"]["newest_blocks"][:2]
        drawn = [block for block in newest if (block["category"], block["op"]) == ("noise", "_generate_noise")]
        if entry["peak"]["phase"] != "noise" or len(drawn) < 2 or drawn[0]["bytes"] != drawn[1]["bytes"]:
            continue
        size = int(drawn[1]["bytes"])
        if run.material(device, size):
            module = next((one for one, fact in run.noted("largest_parameter") if fact["bytes"] == size), "")
            yield finding(
                "noise_allocated_twice",
                module,
                size,
                f"the peak of {device} is in add_noise, where the last two blocks have {format_bytes(size)} each: "
                "zeros that nobody reads, and the noise",
                "in opacus.optimizers.optimizer._generate_noise, make the zeros only where std is 0; or lower what "
                "lives beside the noise, which is largest for the parameter with the most elements",
                device=device,
            )
