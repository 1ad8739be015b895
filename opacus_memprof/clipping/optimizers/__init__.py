# SPDX-License-Identifier: Apache-2.0
"""The optimizers of flash_clip: on one device, with an adaptive bound, under DDP and under FSDP2."""

from opacus_memprof.clipping.optimizers.adaptive import DPOptimizerFlashClipAdaptive
from opacus_memprof.clipping.optimizers.ddp import DPOptimizerFlashClipDDP
from opacus_memprof.clipping.optimizers.fsdp import DPOptimizerFlashClipFSDP
from opacus_memprof.clipping.optimizers.optimizer import DPOptimizerFlashClip
from opacus_memprof.errors import MemprofError


def optimizer_class(clipping: str, distributed: bool, is_sharded: bool = False) -> type[DPOptimizerFlashClip]:
    """Returns the optimizer class for a kind of clipping and parallelism.

    Args:
        clipping: "flat", "per_layer", "adaptive" or "automatic".
        distributed: whether several ranks train the model.
        is_sharded: whether `fully_shard` has sharded the model.

    Raises:
        MemprofError: clipping is adaptive on several ranks.
    """
    if clipping == "adaptive":
        if distributed:
            raise MemprofError("clipping='adaptive' trains on one device, as in Opacus; use 'flat' on several.")
        return DPOptimizerFlashClipAdaptive
    if is_sharded:
        return DPOptimizerFlashClipFSDP
    return DPOptimizerFlashClipDDP if distributed else DPOptimizerFlashClip


__all__ = ["optimizer_class"]
