# SPDX-License-Identifier: Apache-2.0
"""Large tensors that are made but not filled. Imports torch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SMALL = 2**20  # bytes, as kSmall of csrc/virtual_gpu/limits.h: smaller ones have their values

_FACTORIES = {
    getattr(torch.ops.aten, name)
    for name in ("zeros", "ones", "full", "rand", "randn", "zeros_like", "ones_like", "full_like", "rand_like")
}
_COPIES = {torch.ops.aten.clone, torch.ops.aten._to_copy}


class UntouchedTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, tensors of more than `SMALL` bytes are not written: neither by what fills them in place (the functions
    of torch.nn.init), nor as copies, nor when they are made."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        packet = func.overloadpacket
        if packet in _FACTORIES:
            template = func(*args, **(kwargs | {"device": "meta"}))
            if _bytes(template) > SMALL:
                device = kwargs.get("device") or (args[0].device if isinstance(args[0], torch.Tensor) else None)
                return torch.empty_like(template, device=device or torch.get_default_device())
        elif packet in _COPIES and _bytes(args[0]) > SMALL and args[0].device.type == "cpu":
            places = {name: kwargs[name] for name in ("dtype", "device") if kwargs.get(name) is not None}
            return torch.empty_like(args[0], **places)
        elif args and _writes_first(func) and _bytes(args[0]) > SMALL:
            return args[0]
        return func(*args, **kwargs)


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _writes_first(func: Any) -> bool:
    """Whether it is an operation in place, of its first argument's values and not of its shape or storage."""
    name = func.overloadpacket.__name__
    return (
        name.endswith("_") and not name.endswith("__") and name not in ("set_", "resize_", "detach_", "requires_grad_")
    )
