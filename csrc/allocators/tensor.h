// SPDX-License-Identifier: Apache-2.0
// Finds the block under a Python tensor, and gives it another category or module.
#pragma once

#include <Python.h>

#include <cstdint>
#include <span>

#include "core/vocabulary.h"

namespace at {
class Tensor;
}

namespace opacus_memprof {

// A set of categories, for `expected`.
constexpr std::uint64_t set_of(Category category) {
  return std::uint64_t{1} << static_cast<unsigned>(category);
}

// Calls Recorder::retag for the block under the tensor; a block that was allocated before the
// profiler was installed is adopted first. Skips objects that are not tensors, and tensors without
// memory. Returns the block's bytes if its category or module changed, otherwise 0.
std::uint64_t retag_tensor(PyObject* tensor, std::uint8_t category, std::uint16_t module,
                           std::uint64_t expected);

// Does the same for a tensor that may have no Python object, whatever its category.
void retag_tensor(const at::Tensor& tensor, std::uint8_t category, std::uint16_t module);

// Does the same as the first one for the gradient of a parameter, if it has one.
std::uint64_t retag_gradient(PyObject* parameter, std::uint8_t category, std::uint16_t module);

// Prefetches the data that retag_tensor (retag_gradient) will read. Called for each of many tensors
// before the first is retagged, so that the cache misses overlap.
void prefetch_block_of(PyObject* tensor);
void prefetch_block_of_gradient(PyObject* parameter);

// Returns the module of the block under a tensor; 0 if there is none.
std::uint16_t module_of_tensor(PyObject* tensor);

// Returns whether only the program holds the tensor's memory: nobody shares it except, if the
// tensor is a view, its base. (A detached activation shares its memory with the activation.)
bool held_by_program_alone(const at::Tensor& tensor);

// Empty if the object is not a tensor.
std::span<const std::int64_t> shape_of(PyObject* tensor);

}  // namespace opacus_memprof
