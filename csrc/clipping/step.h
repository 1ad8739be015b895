// SPDX-License-Identifier: Apache-2.0
// The work of the optimizer's step with many small tensors, without Python in between.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace opacus_memprof::clipping {

// Groups the lists' indices: lists whose first tensors have the same device, dtype and number of
// samples (first dimension) or, if `whole_shapes`, whose tensors all have the same devices, dtypes,
// shapes and strides.
std::vector<std::vector<std::int64_t>> group_alike(
    const std::vector<std::vector<at::Tensor>>& lists, bool whole_shapes);

// Returns a table with a row for each list: the addresses of its tensors and, if `with_sizes`, the
// number of elements per sample of the first one. int64, on the tensors' device. The host does not
// wait.
at::Tensor address_table(const std::vector<std::vector<at::Tensor>>& lists, bool with_sizes);

// Returns a table with a row for each pair [N, ..., rows], [N, ..., columns] and the sum [rows,
// columns] of its samples' products: the addresses of the three, the tokens of a sample, rows,
// columns, and the strides of a sample, a token and a feature of both. A tensor is contiguous
// unless it has three dimensions. int64, as in `address_table`.
at::Tensor product_table(const std::vector<std::pair<at::Tensor, at::Tensor>>& pairs,
                         const std::vector<at::Tensor>& sums);

// From now on, while a CUDA graph is captured, `address_table` takes its tables from `memory`
// (int64, one dimension, allocated before). The tables are filled later: a copy in the graph would
// read the host's memory again in every replay, and all kernels of the graph may overwrite other
// memory of the graph. Throws if the memory is not enough.
void begin_tables_of_graph(const at::Tensor& memory);

// Ends that. Returns the tables since then, each with its rows in the host's memory.
std::vector<std::pair<at::Tensor, at::Tensor>> end_tables_of_graph();

// Returns an empty tensor for the sum over the samples of each stack [N, ...].
std::vector<at::Tensor> empty_sums(const std::vector<at::Tensor>& stacks, at::ScalarType dtype);

// Returns, for each pair, the sum over samples n and all other dimensions except the last of
// factors[n] times the outer product of the first and the second tensor, [features of the first,
// features of the second]. If `factors` has two dimensions, the i-th pair uses factors[i][n]. It is
// one product over all of them, for which the tensor with fewer features is scaled. Sums of low
// precision are float32.
//
// Ends before the first pair for which this is impossible: with fewer than two samples, without
// elements, of two dtypes, of another dtype or device than the first pair's, or whose copies need
// more than `most` bytes. Copies are the scaled tensor and, for tensors [N, T, features] with
// adjacent tokens (of convolutions), the other one. In low precision the scaled tensor is float32;
// bfloat16 on CUDA splits it into two of bfloat16, and others are multiplied in float32.
std::vector<at::Tensor> sum_outer_products(
    const std::vector<std::pair<at::Tensor, at::Tensor>>& pairs, const at::Tensor& factors,
    std::int64_t most);

// The data with which a kernel adds to each sum the numbers that normal_ on CUDA would draw for it
// from `generator` (the device's default one if there is none). The generator advances as if it
// had.
struct NormalNumbers {
  at::Tensor table;  // int64, on the device; the host does not wait. Each nonempty sum has a row:
                     // its address, its elements, the threads that torch would draw with, the
                     // first one's Philox counter, the first program, the seed
  std::int64_t programs = 0;  // of all rows
};

// `most_threads` is the maximum number of torch's threads on this device, and `threads_of_program`
// is the number of them that one of the kernel's programs replaces.
NormalNumbers reserve_normal(const std::vector<at::Tensor>& sums,
                             const std::optional<at::Generator>& generator,
                             std::int64_t most_threads, std::int64_t threads_of_program);

// Returns normal noise of the shape, dtype and device of each reference, drawn in their order.
std::vector<at::Tensor> draw_normal(const std::vector<at::Tensor>& references, double std,
                                    const std::optional<at::Generator>& generator);

// Adds its noise, of the same shape, dtype and device, to each sum in place, and divides it.
void add_and_divide(const std::vector<at::Tensor>& sums, const std::vector<at::Tensor>& noise,
                    double divisor);

}  // namespace opacus_memprof::clipping
