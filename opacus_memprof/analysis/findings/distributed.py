# SPDX-License-Identifier: Apache-2.0
"""Finds memory that each rank of a distributed training uses unnecessarily."""

from collections.abc import Iterator

from opacus_memprof.analysis.findings.run import Run
from opacus_memprof.profiles.profile import Finding
from opacus_memprof.profiles.units import format_bytes


def noise_of_whole_parameters(run: Run) -> Iterator[Finding]:
    """Finds noise for whole parameters under FSDP, where each rank has a shard: _generate_noise uses the shape of the
    DTensor, which is that of the whole parameter."""
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
                f"add_noise makes zeros and noise of a whole parameter on every rank of {device}: "
                f"{format_bytes(2 * whole)} for the largest one, of which this rank holds {format_bytes(shard)}",
                "in opacus.optimizers.optimizer._generate_noise, draw the noise for reference.to_local() where the "
                "reference is a DTensor, from a generator that has another seed on each rank",
                device=device,
                parameter_bytes=whole,
                shard_bytes=shard,
            )


def gradients_reduced_twice(run: Run) -> Iterator[Finding]:
    """Finds DDP's buckets, which reduce p.grad in backward, where Opacus' optimizer reduces the gradients again."""
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
                f"gradients again when it has added the noise: DDP's buckets took {format_bytes(size)} at the peak of "
                f"{device}",
                "wrap the model in opacus.distributed.DifferentiallyPrivateDistributedDataParallel in the place of "
                "torch's DistributedDataParallel: the same result, without buckets",
                device=device,
            )
