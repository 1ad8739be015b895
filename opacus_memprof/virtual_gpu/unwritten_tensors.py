# SPDX-License-Identifier: Apache-2.0
"""A dispatch mode in which large tensors are allocated but never written. Imports torch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SMALL = 2**20  # bytes; tensors up to this size are written. The same as kSmall of csrc/virtual_gpu/machine/limits.h

_FACTORIES = {
    getattr(torch.ops.aten, name)
    for name in ("zeros", "ones", "full", "rand", "randn", "zeros_like", "ones_like", "full_like", "rand_like")
}
_COPIES = {torch.ops.aten.clone, torch.ops.aten._to_copy}


class UnwrittenTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which tensors of more than `SMALL` bytes are not written: not by in-place operations (as in
    torch.nn.init), nor by copies, nor by factory functions."""

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
            options = {name: kwargs[name] for name in ("dtype", "device") if kwargs.get(name) is not None}
            return torch.empty_like(args[0], **options)
        elif args and _is_in_place(func) and _bytes(args[0]) > SMALL:
            return args[0]
        return func(*args, **kwargs)


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _is_in_place(func: Any) -> bool:
    """Whether an operation writes the values of its first argument, as opposed to its shape or storage."""
    name = func.overloadpacket.__name__
    return (
        name.endswith("_") and not name.endswith("__") and name not in ("set_", "resize_", "detach_", "requires_grad_")
    )
