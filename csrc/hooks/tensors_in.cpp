// SPDX-License-Identifier: Apache-2.0
#include "hooks/tensors_in.h"

#include <torch/csrc/autograd/python_variable.h>

#include "allocators/tensor.h"

namespace py = pybind11;

namespace opacus_memprof {

namespace {

// Returns whether the object is neither a tensor nor a mapping, from its type alone. Asking whether
// a type implements collections.abc.Mapping takes far longer.
bool is_plain(PyObject* value) {
  return value == Py_None || PyLong_Check(value) || PyFloat_Check(value) || PyUnicode_Check(value);
}

bool is_mapping(PyObject* value) {
  if (PyDict_Check(value)) return true;
  static PyObject* const mapping =
      py::object(py::module_::import("collections.abc").attr("Mapping")).release().ptr();
  const int is = PyObject_IsInstance(value, mapping);
  if (is < 0) throw py::error_already_set();
  return is != 0;
}

py::object steal_or_raise(PyObject* made) {
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

}  // namespace

TensorsIn::TensorsIn(py::handle value) {
  if (add(value.ptr()) || value.is_none()) return;
  add_items(steal_or_raise(PySequence_List(value.ptr())).ptr());
}

bool TensorsIn::add(PyObject* value) {
  if (THPVariable_Check(value)) {
    tensors_.push_back(value);
    references_.push_back(py::reinterpret_borrow<py::object>(value));
  } else if (PyTuple_Check(value) || PyList_Check(value)) {
    add_items(value);
  } else if (!is_plain(value) && is_mapping(value)) {
    add_items(steal_or_raise(PyMapping_Values(value)).ptr());
  } else {
    return false;
  }
  return true;
}

void TensorsIn::add_items(PyObject* sequence) {
  if (++level_ > kMostLevels) {
    PyErr_Format(
        PyExc_RecursionError,
        "tensors are looked for at most %d levels deep: does a sequence or mapping contain "
        "itself?",
        kMostLevels);
    throw py::error_already_set();
  }
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence); ++i) {
    const auto item = py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(sequence, i));
    add(item.ptr());
  }
  --level_;
}

std::uint64_t retag_tensors(py::handle tensors, std::uint8_t category, std::uint16_t module,
                            std::uint64_t expected) {
  std::uint64_t bytes = 0;
  for (PyObject* tensor : TensorsIn(tensors)) {
    bytes += retag_tensor(tensor, category, module, expected);
  }
  return bytes;
}

}  // namespace opacus_memprof
