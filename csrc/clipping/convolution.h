// SPDX-License-Identifier: Apache-2.0
// A convolution as a matrix product.
#pragma once

#include <ATen/core/Tensor.h>

namespace opacus_memprof::clipping {

// What a convolution's kernel sees at each place of an input [N, channels, ...], as a matrix
// [N, channels and taps, places]: a view where the input's layout allows it, as for a kernel of one
// tap. `pads` are the zeros around the input, the last dimension first.
//
// The windows are a view, which one kernel copies: torch's own im2col on CUDA launches one for each
// sample.
at::Tensor unfold(const at::Tensor& input, at::IntArrayRef pads, at::IntArrayRef kernel,
                  at::IntArrayRef stride, at::IntArrayRef dilation);

}  // namespace opacus_memprof::clipping
