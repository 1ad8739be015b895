// SPDX-License-Identifier: Apache-2.0
// What the optimizer's step does with many small tensors, without Python between two of them.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace opacus_memprof::clipping {

// Groups of the lists' indices: of lists whose first tensors have the same device, dtype and number
// of samples (first dimension) or, if `whole_shapes`, whose tensors all have the same devices,
// dtypes, shapes and strides.
std::vector<std::vector<std::int64_t>> group_alike(
    const std::vector<std::vector<at::Tensor>>& lists, bool whole_shapes);

// A table with a row for each list: the addresses of its tensors and, if `with_sizes`, the elements
// that each sample of the first one has. int64, on the tensors' device, for which the host does not
// wait.
at::Tensor address_table(const std::vector<std::vector<at::Tensor>>& lists, bool with_sizes);

// A table with a row for each pair [N, ..., rows], [N, ..., columns] and the sum [rows, columns] of
// its samples' products: the addresses of the three, the tokens of a sample, rows, columns, and the
// strides of a sample, a token and a feature of both. A tensor is contiguous unless it has three
// dimensions. int64, as of `address_table`.
at::Tensor product_table(const std::vector<std::pair<at::Tensor, at::Tensor>>& pairs,
                         const std::vector<at::Tensor>& sums);

// From now on, while a CUDA graph is captured, `address_table` takes its tables from `memory`
// (int64, one dimension, allocated before), and leaves them to be filled: a copy in the graph would
// read the host's memory anew in every replay, and other memory of the graph is written to by all
// of its kernels in turn. Throws once there is not enough.
void begin_tables_of_graph(const at::Tensor& memory);

// Ends that. Returns the tables since then, each with its rows in the host's memory.
std::vector<std::pair<at::Tensor, at::Tensor>> end_tables_of_graph();

// A tensor for the sum over the samples of each stack [N, ...], not filled.
std::vector<at::Tensor> empty_sums(const std::vector<at::Tensor>& stacks, at::ScalarType dtype);

// The sum over samples n and all other dimensions but the last of factors[n] (factors[i][n] for the
// i-th pair, if there are two dimensions) times the outer product of the first and the second
// tensor of each pair, [features of the first, features of the second]: one product over all of
// them, for which the tensor with fewer features is scaled. Sums of low precision are float32. Ends
// before the first pair of which this cannot be done: of fewer than two samples, of no numbers, of
// two dtypes, of another dtype or device than the first pair's, or of which the copies take more
// than `most` bytes: the scaled tensor and, of tensors [N, T, features] whose tokens lie beside one
// another (of convolutions), the other. In low precision the scaled tensor is float32; bfloat16 on
// CUDA splits it into two of bfloat16, and others are multiplied in float32.
std::vector<at::Tensor> sum_outer_products(
    const std::vector<std::pair<at::Tensor, at::Tensor>>& pairs, const at::Tensor& factors,
    std::int64_t most);

// What a kernel needs to add to each sum the numbers that normal_ on CUDA would draw for it from
// `generator` (the device's default one if there is none), which goes on as if it had.
struct NormalNumbers {
  at::Tensor table;  // int64, on the device, for which the host does not wait; a row for each sum
                     // that is not empty: its address, its elements, the threads that torch would
                     // draw with, the first one's Philox counter, the first program, the seed
  std::int64_t programs = 0;  // of all rows
};

// `most_threads` is the most that torch draws with on this device, and `threads_of_program` how
// many of them one of the kernel's programs stands for.
NormalNumbers reserve_normal(const std::vector<at::Tensor>& sums,
                             const std::optional<at::Generator>& generator,
                             std::int64_t most_threads, std::int64_t threads_of_program);

// Normal noise of the shape, dtype and device of each reference, drawn in their order.
std::vector<at::Tensor> draw_normal(const std::vector<at::Tensor>& references, double std,
                                    const std::optional<at::Generator>& generator);

}  // namespace opacus_memprof::clipping
