# SPDX-License-Identifier: Apache-2.0
"""Attributes what distributed training allocates: DDP's buckets, and what FSDP2 gathers, scatters and shards.

torch's classes are patched, because scripts wrap their model before they pass it to Opacus. FSDP2 calls `unshard`,
`wait_for_unshard` and `post_backward` for each group of parameters, in forward and on autograd's threads.
"""

import functools
from collections.abc import Callable
from typing import Any

from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel

from opacus_memprof.hooks.attachment import Attachment
from opacus_memprof.hooks.vocabulary import COMMUNICATION, GRADIENTS, INPUTS, MODEL_PARAMETERS
from opacus_memprof.recording import native

# The classes that wrap the user's model, and their attribute that holds it.
DDP_WRAPPERS = ((DistributedDataParallel, "module"), (DifferentiallyPrivateDistributedDataParallel, "module"))


def wrap_distributed(attachment: Attachment) -> None:
    """Tags what every DDP and FSDP2 module allocates from now on."""
    tag_buckets = _tag(COMMUNICATION, "DistributedDataParallel")
    replace = attachment.replace_attribute
    replace(DistributedDataParallel, "__init__", tag_buckets(DistributedDataParallel.__init__))
    replace(DistributedDataParallel, "_pre_forward", _wrap_pre_forward(DistributedDataParallel._pre_forward))
    tag_shards = _tag(MODEL_PARAMETERS, "fully_shard")
    replace(FSDPParam, "_init_sharded_param", tag_shards(FSDPParam._init_sharded_param))
    replace(FSDPParamGroup, "unshard", _wrap_group_method(FSDPParamGroup.unshard, COMMUNICATION))
    unsharded = native.category_id("unsharded_parameters")
    replace(FSDPParamGroup, "wait_for_unshard", _wrap_group_method(FSDPParamGroup.wait_for_unshard, unsharded))
    replace(FSDPParamGroup, "post_backward", _wrap_post_backward(FSDPParamGroup.post_backward))


def _wrap_pre_forward(pre_forward: Callable[..., Any]) -> Callable[..., Any]:
    """`_pre_forward` allocates the buckets a second time, in the order in which gradients became ready, and may move
    the batch to the device, which is retagged as inputs."""
    tagged = _tag(COMMUNICATION, "DistributedDataParallel")(pre_forward)

    @functools.wraps(pre_forward)
    def wrapper(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        moved = tagged(self, *inputs, **kwargs)
        native.retag_if((moved,), (COMMUNICATION,), INPUTS)
        return moved

    return wrapper


def _wrap_group_method(method: Callable[..., Any], category: int) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _tag(category, method.__name__, _owner_of_group(self)):
            return method(self, *args, **kwargs)

    return wrapper


def _wrap_post_backward(post_backward: Callable[..., Any]) -> Callable[..., Any]:
    """`post_backward` reduces and scatters gradients of the unsharded parameters: they are copied into a buffer, and
    each rank gets its shard of their sum, in one block for the group."""
    tagged = _wrap_group_method(post_backward, COMMUNICATION)
    unsharded = native.category_id("unsharded_gradients")

    @functools.wraps(post_backward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = [fsdp_param.sharded_param for fsdp_param in self.fsdp_params]
        owners = [native.owner_of(parameter) for parameter in sharded]
        for fsdp_param, owner in zip(self.fsdp_params, owners, strict=True):
            parameter = getattr(fsdp_param, "_unsharded_param", None)
            if parameter is not None and parameter.grad is not None:
                native.retag(parameter.grad, unsharded, owner)
        result = tagged(self, *args, **kwargs)
        for parameter, owner in zip(sharded, owners, strict=True):
            if parameter.grad is not None:
                native.retag(parameter.grad, GRADIENTS, owner)
        return result

    return wrapper


def _owner_of_group(group: Any) -> int:
    """The module id of a group: the parameters of one module that was passed to fully_shard, without those of its
    submodules that were passed to fully_shard themselves."""
    return native.owner_of(group.fsdp_params[0].sharded_param) if group.fsdp_params else 0


@functools.cache
def _tag(category: int, op: str, module: int | None = None) -> native.Tag:
    return native.Tag(category=category, op=native.op_id(op), module=module)
