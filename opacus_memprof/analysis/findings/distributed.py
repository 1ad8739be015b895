# SPDX-License-Identifier: Apache-2.0
"""What each rank of a distributed training holds without need."""

from collections.abc import Iterator
from typing import Any

from opacus_memprof.analysis.findings.run import Run, finding
from opacus_memprof.units import format_bytes


def noise_of_whole_parameters(run: Run) -> Iterator[dict[str, Any]]:
    """FSDP gives each rank a shard of a parameter. _generate_noise takes the shape of the DTensor, which is the whole
    parameter's, and makes zeros and noise of it on every rank."""
    sharded = run.noted("sharded_parameter")
    if not sharded:
        return
    module, largest = max(sharded, key=lambda one: one[1]["bytes"])
    whole, shard = int(largest["bytes"]), int(largest["shard_bytes"])
    for device in run.devices:
        if run.material(device, 2 * (whole - shard)):
            yield finding(
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


def gradients_reduced_twice(run: Run) -> Iterator[dict[str, Any]]:
    """DDP reduces p.grad in backward, through buckets; Opacus' distributed optimizers reduce what they make of it."""
    if not run.noted("gradients_reduced"):
        return
    for device, entry in run.devices.items():
        size = entry["peak"]["ops"].get("DistributedDataParallel", {}).get("communication", 0)
        if run.material(device, size):
            yield finding(
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
