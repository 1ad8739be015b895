# SPDX-License-Identifier: Apache-2.0
"""Attributes the memory of distributed training: DDP's buckets, and FSDP2's gathered, scattered and sharded tensors.

torch's classes are patched, because programs wrap their model before they pass it to Opacus. FSDP2 calls `unshard`,
`wait_for_unshard` and `post_backward` for each group of parameters, in forward and on autograd's threads.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from opacus_memprof.hooks.vocabulary import (
    COMMUNICATION,
    GRADIENTS,
    INPUTS,
    MODEL_PARAMETERS,
    DifferentiallyPrivateDistributedDataParallel,
)
from opacus_memprof.recording import native
from opacus_memprof.recording.attachment import Attachment
from opacus_memprof.recording.faults import CallHook

# The classes that wrap the user's model, and the attribute with the model.
DDP_WRAPPERS = ((DistributedDataParallel, "module"), (DifferentiallyPrivateDistributedDataParallel, "module"))

_DDP = "torch.nn.parallel:DistributedDataParallel"
_FSDP_PARAMETER = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam"
_FSDP_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup"


def wrap_distributed(attachment: Attachment) -> None:
    """Tags the allocations of all DDP and FSDP2 modules from now on."""
    observe = attachment.observe
    observe(f"{_DDP}.__init__", _observe_under(_tag(COMMUNICATION, "DistributedDataParallel")))
    observe(f"{_DDP}._pre_forward", _observe_pre_forward)
    observe(f"{_FSDP_PARAMETER}._init_sharded_param", _observe_under(_tag(MODEL_PARAMETERS, "fully_shard")))
    observe(f"{_FSDP_GROUP}.unshard", _observe_group(COMMUNICATION, "unshard"))
    unsharded = native.category_id("unsharded_parameters")
    observe(f"{_FSDP_GROUP}.wait_for_unshard", _observe_group(unsharded, "wait_for_unshard"))
    observe(f"{_FSDP_GROUP}.post_backward", _observe_post_backward)


def _observe_under(tag: native.Tag) -> Callable[..., CallHook]:
    def observation(*args: Any, **kwargs: Any) -> CallHook:
        with tag:
            yield

    return observation


def _observe_pre_forward(*args: Any, **kwargs: Any) -> CallHook:
    """Observes `_pre_forward`, which allocates the buckets again, in the order in which gradients became ready.

    It may also move the batch to the device, which is retagged as inputs.
    """
    with _tag(COMMUNICATION, "DistributedDataParallel"):
        moved = yield
    native.retag_if((moved,), (COMMUNICATION,), INPUTS)


def _observe_group(category: int, op: str) -> Callable[..., CallHook]:
    def observation(group: Any, *args: Any, **kwargs: Any) -> CallHook:
        with _tag(category, op, _owner_of_group(group)):
            yield

    return observation


def _observe_post_backward(group: Any, *args: Any, **kwargs: Any) -> CallHook:
    """Observes `post_backward`, which reduces and scatters gradients of the unsharded parameters.

    They are copied into a buffer, and each rank gets its shard of their sum, in one block for the group.
    """
    unsharded = native.category_id("unsharded_gradients")
    sharded = [fsdp_param.sharded_param for fsdp_param in group.fsdp_params]
    owners = [native.owner_of(parameter) for parameter in sharded]
    for fsdp_param, owner in zip(group.fsdp_params, owners, strict=True):
        parameter = getattr(fsdp_param, "_unsharded_param", None)
        if parameter is not None and parameter.grad is not None:
            native.retag(parameter.grad, unsharded, owner)
    with _tag(COMMUNICATION, "post_backward", _owner_of_group(group)):
        yield
    for parameter, owner in zip(sharded, owners, strict=True):
        if parameter.grad is not None:
            native.retag(parameter.grad, GRADIENTS, owner)


def _owner_of_group(group: Any) -> int:
    """Returns the module id of a group of parameters.

    The group has the parameters of one module that was passed to fully_shard, except those of submodules that were
    passed to it separately.
    """
    return native.owner_of(group.fsdp_params[0].sharded_param) if group.fsdp_params else 0


@functools.cache
def _tag(category: int, op: str, module: int | None = None) -> native.Tag:
    return native.Tag(category=category, op=native.op_id(op), module=module)
