// SPDX-License-Identifier: Apache-2.0
// `module.activations`, the list on which Opacus puts what it captures.
#pragma once

#include <Python.h>

namespace opacus_memprof {

// A borrowed reference; nullptr where the module has none. Sets no error.
inline PyObject* activations_of(PyObject* module) noexcept {
  static PyObject* const name = PyUnicode_InternFromString("activations");
  PyObject* attributes = PyObject_GenericGetDict(module, nullptr);
  if (attributes == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  PyObject* activations = PyDict_GetItem(attributes, name);
  Py_DECREF(attributes);  // the module has it still
  return activations != nullptr && PyList_Check(activations) ? activations : nullptr;
}

inline Py_ssize_t captures_on(PyObject* module) noexcept {
  PyObject* activations = activations_of(module);
  return activations == nullptr ? 0 : PyList_GET_SIZE(activations);
}

}  // namespace opacus_memprof
