// SPDX-License-Identifier: Apache-2.0
// The tensors in what programs pass around.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace opacus_memprof {

class TensorsIn {
 public:
  // Of a tensor, or of sequences and mappings that nest some; None has none. Of another iterable,
  // of its items. Throws py::error_already_set where it is none of these.
  explicit TensorsIn(pybind11::handle value);

  [[nodiscard]] const std::vector<PyObject*>& all() const noexcept { return tensors_; }
  [[nodiscard]] auto begin() const noexcept { return tensors_.begin(); }
  [[nodiscard]] auto end() const noexcept { return tensors_.end(); }

 private:
  bool nested(PyObject* value);  // false where it is nothing that nests tensors
  void items(PyObject* sequence);

  std::vector<PyObject*> tensors_;
  std::vector<pybind11::object> kept_;  // alive, for the search may run the program's own code
};

// retag_tensor for each of them; returns the bytes that changed.
std::uint64_t retag_tensors(pybind11::handle tensors, std::uint8_t category, std::uint16_t module,
                            std::uint64_t expected);

}  // namespace opacus_memprof
