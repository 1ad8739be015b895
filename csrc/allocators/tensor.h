// SPDX-License-Identifier: Apache-2.0
// Finds the block under a Python tensor.
#pragma once

#include <Python.h>

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/vocabulary.h"

namespace at {
class Tensor;
}

namespace opacus_memprof {

// A set of categories, for `expected`.
constexpr std::uint64_t set_of(Category category) {
  return std::uint64_t{1} << static_cast<unsigned>(category);
}

// Calls retag for the block under each tensor; a block from before the profiler is adopted first.
// Objects that are no tensors, and tensors without memory of their own, are skipped.
// Returns the bytes that changed category or module.
std::uint64_t retag_tensor(PyObject* tensor, std::uint8_t category, std::uint16_t module,
                           std::uint64_t expected);

// What retag_tensor will read: called for each of many, it fetches in parallel what would else be
// waited for one after the other.
void prefetch_block_of(PyObject* tensor) noexcept;

// As these, for a parameter's gradient, if it has one.
void prefetch_block_of_gradient(PyObject* parameter) noexcept;
std::uint64_t retag_gradient(PyObject* parameter, std::uint8_t category, std::uint16_t module);

// As retag_tensor, of a tensor that Python need not know.
void retag_tensor(const at::Tensor& tensor, std::uint8_t category, std::uint16_t module);

// Whose the block under a tensor is; 0 where nobody's, and where there is none.
std::uint16_t module_of_tensor(PyObject* tensor);

// Its memory is this tensor's and, of a view, its base's: a detached activation's is also the
// activation's.
bool held_by_program_alone(const at::Tensor& tensor);

// Empty where it is no tensor.
std::span<const std::int64_t> shape_of(PyObject* tensor);

// Opacus' captured activations, a stack for each module. Called with the GIL held.
void capture_tensors(std::uint16_t module, std::span<PyObject* const> tensors);
void release_captures(std::uint16_t module);
void settle_captures(std::uint16_t module);
// `outputs` are about to be returned to the program: what they alone hold, autograd does not.
void settle_all_captures(std::span<PyObject* const> outputs);
std::vector<std::pair<std::uint16_t, std::size_t>> outstanding_captures();

}  // namespace opacus_memprof
