// SPDX-License-Identifier: Apache-2.0
// Finds the tensors in nested arguments of a program.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace opacus_memprof {

class TensorsIn {
 public:
  // Deeper than the arguments of any program. A list that contains itself has no depth.
  static constexpr int kMostLevels = 100;

  // Finds the tensors in a tensor, in nested sequences and mappings, or among the items of another
  // iterable; None has none. Throws py::error_already_set: TypeError if the value is none of these,
  // RecursionError beyond kMostLevels, and errors of the program's own mappings.
  explicit TensorsIn(pybind11::handle value);

  [[nodiscard]] const std::vector<PyObject*>& all() const noexcept { return tensors_; }
  [[nodiscard]] auto begin() const noexcept { return tensors_.begin(); }
  [[nodiscard]] auto end() const noexcept { return tensors_.end(); }

 private:
  // Adds the tensors in the value; false if it is not a tensor, sequence or mapping.
  bool add(PyObject* value);
  void add_items(PyObject* sequence);

  std::vector<PyObject*> tensors_;
  // References to the same tensors, because the search may run code of the program that drops them.
  std::vector<pybind11::object> references_;
  int level_ = 0;
};

// Calls retag_tensor for each of them; returns the bytes that changed.
std::uint64_t retag_tensors(pybind11::handle tensors, std::uint8_t category, std::uint16_t module,
                            std::uint64_t expected);

}  // namespace opacus_memprof
