// SPDX-License-Identifier: Apache-2.0
// Recognizes whether a forward has computed its outputs in the proved way.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

namespace opacus_memprof::clipping {

// Returns the patterns of the autograd graph behind `outputs`, sorted: a hash for each node, of the
// operations up to three edges above it. Equal hashes occur once, so that a loop over more tokens
// gives the same patterns. An operation is its class and, for the shape of its result, the number
// of dimensions and whether the first is 1 or `batch`. The graph behind `inputs` is ignored.
std::vector<std::int64_t> graph_patterns(const std::vector<at::Tensor>& outputs,
                                         const std::vector<at::Tensor>& inputs, std::int64_t batch);

}  // namespace opacus_memprof::clipping
