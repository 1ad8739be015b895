# SPDX-License-Identifier: Apache-2.0
"""Distributed training: the buckets of DDP, and what FSDP2 gathers, scatters and shards.

On torch's classes, for scripts wrap their model before they hand it to Opacus. FSDP2 calls the three methods below for
each group of parameters, in forward and on autograd's threads.
"""

import functools
from collections.abc import Callable
from typing import Any

from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel

from opacus_memprof import _native
from opacus_memprof.hooks.attach import Attachment
from opacus_memprof.hooks.vocabulary import COMMUNICATION, GRADIENTS, INPUTS, MODEL_PARAMETERS

# What stands around the user's model, and the attribute that it holds it in.
DDP_WRAPPERS = ((DistributedDataParallel, "module"), (DifferentiallyPrivateDistributedDataParallel, "module"))


def wrap_distributed(attachment: Attachment) -> None:
    """From now on DDP's and FSDP2's own allocations are known for what they are, whoever uses them."""
    buckets = _tag(COMMUNICATION, "DistributedDataParallel")
    replace = attachment.replace_attribute
    replace(DistributedDataParallel, "__init__", buckets(DistributedDataParallel.__init__))
    replace(DistributedDataParallel, "_pre_forward", _pre_forward(DistributedDataParallel._pre_forward))
    shards = _tag(MODEL_PARAMETERS, "fully_shard")
    replace(FSDPParam, "_init_sharded_param", shards(FSDPParam._init_sharded_param))
    replace(FSDPParamGroup, "unshard", _of_group(FSDPParamGroup.unshard, COMMUNICATION))
    unsharded = _native.category_id("unsharded_parameters")
    replace(FSDPParamGroup, "wait_for_unshard", _of_group(FSDPParamGroup.wait_for_unshard, unsharded))
    replace(FSDPParamGroup, "post_backward", _post_backward(FSDPParamGroup.post_backward))


def _pre_forward(pre_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Allocates buckets again, once, in the order in which gradients became ready; and may move the batch."""
    tagged = _tag(COMMUNICATION, "DistributedDataParallel")(pre_forward)

    @functools.wraps(pre_forward)
    def wrapper(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        moved = tagged(self, *inputs, **kwargs)
        _native.retag_if((moved,), (COMMUNICATION,), INPUTS)
        return moved

    return wrapper


def _of_group(method: Callable[..., Any], category: int) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _tag(category, method.__name__, _owner_of_group(self)):
            return method(self, *args, **kwargs)

    return wrapper


def _post_backward(post_backward: Callable[..., Any]) -> Callable[..., Any]:
    """Autograd's gradients are of the whole parameters; they go into a buffer, and each rank gets a part of their sum,
    in one block for the group."""
    scattering = _of_group(post_backward, COMMUNICATION)
    unsharded = _native.category_id("unsharded_gradients")

    @functools.wraps(post_backward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = [parameter.sharded_param for parameter in self.fsdp_params]
        owners = [_native.owner_of(parameter) for parameter in sharded]
        for parameter, owner in zip(self.fsdp_params, owners, strict=True):
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None and whole.grad is not None:
                _native.retag(whole.grad, unsharded, owner)
        result = scattering(self, *args, **kwargs)
        for parameter, owner in zip(sharded, owners, strict=True):
            if parameter.grad is not None:
                _native.retag(parameter.grad, GRADIENTS, owner)
        return result

    return wrapper


def _owner_of_group(group: Any) -> int:
    """A group is a module that was passed to fully_shard, without what was passed on its own."""
    return _native.owner_of(group.fsdp_params[0].sharded_param) if group.fsdp_params else 0


@functools.cache
def _tag(category: int, op: str, module: int | None = None) -> _native.Tag:
    return _native.Tag(category=category, op=_native.op_id(op), module=module)
