# SPDX-License-Identifier: Apache-2.0
"""The CaptureShape of a module's forward pass, and which convolutions are computed in another memory layout."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from opacus_memprof.profiles.layer_shapes import CaptureShape


def capture_shape(module: nn.Module, inputs: Any, output: Any) -> CaptureShape | None:
    """The shape of a module's input and output; None if they are no tensors."""
    tensors = [value for value in inputs if isinstance(value, Tensor) and value.dim()]
    if not tensors or not isinstance(output, Tensor) or not output.numel():
        return None
    samples = tensors[0].shape[0]
    channels = output.shape[1 if isinstance(module, _ConvNd) else -1] if output.dim() > 1 else 1
    return CaptureShape(
        samples=samples,
        tokens=max(output.numel() // max(samples * channels, 1), 1),
        input_bytes=sum(tensor.nbytes for tensor in tensors),
        output_bytes=output.nbytes,
        element_bytes=output.element_size(),
        from_leaf=not any(tensor.requires_grad for tensor in tensors),
        layout_copied=isinstance(module, _ConvNd) and needs_layout_copy(module, output),
    )


def needs_layout_copy(module: _ConvNd, output: Tensor) -> bool:
    """Whether cuDNN or oneDNN copies this convolution's operands and results into another memory layout.

    cuDNN does so where it uses tensor cores, which need channels last; oneDNN, because it blocks channels. Tensors that
    are channels-last already are not copied. A 1x1 convolution is a matrix product, and for depthwise convolutions
    cuDNN has kernels that need no copies."""
    is_1x1 = max(module.kernel_size) == 1
    if not output.is_contiguous() or output.dtype == torch.float64:
        return False
    if not output.is_cuda:
        return bool(torch._C._get_mkldnn_enabled()) and not (is_1x1 and max(module.stride) == 1)
    if is_1x1 or module.groups == module.in_channels > 1 or not torch.backends.cudnn.enabled:
        return False
    return output.dtype != torch.float32 or _convolutions_use_tf32()


def _convolutions_use_tf32() -> bool:
    precision = getattr(getattr(torch.backends.cudnn, "conv", None), "fp32_precision", "none")
    if precision != "none":
        return bool(precision == "tf32")
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # torch raises it where the old and the new setting contradict each other
        return True
