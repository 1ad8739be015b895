// SPDX-License-Identifier: Apache-2.0
// A convolution as a matrix product.
#pragma once

#include <ATen/core/Tensor.h>

namespace opacus_memprof::clipping {

// Returns the inputs of a convolution's kernel at each position of an input [N, channels, ...], as
// a matrix [N, channels and taps, positions]. It is a view if the input's layout allows it, as for
// a kernel of one tap. `pads` are the zeros around the input, the last dimension first.
//
// The windows are a view, which one kernel copies. torch's own im2col on CUDA launches one kernel
// for each sample.
at::Tensor unfold(const at::Tensor& input, at::IntArrayRef pads, at::IntArrayRef kernel,
                  at::IntArrayRef stride, at::IntArrayRef dilation);

}  // namespace opacus_memprof::clipping
