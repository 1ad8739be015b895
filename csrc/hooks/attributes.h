// SPDX-License-Identifier: Apache-2.0
// Attributes in an object's own __dict__. getattr searches the object's type first, which takes
// several times as long, hundreds of times per step.
#pragma once

#include <Python.h>

namespace opacus_memprof {

// A borrowed reference; nullptr if the object has no such attribute. Sets no error.
inline PyObject* own_attribute(PyObject* object, PyObject* name) noexcept {
  PyObject* attributes = PyObject_GenericGetDict(object, nullptr);
  if (attributes == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  PyObject* value = PyDict_GetItemWithError(attributes, name);
  Py_DECREF(attributes);  // the object has it still
  if (value == nullptr && PyErr_Occurred() != nullptr) PyErr_Clear();
  return value;
}

// `module.activations`, the list to which Opacus appends its captures.
inline PyObject* activations_of(PyObject* module) noexcept {
  static PyObject* const name = PyUnicode_InternFromString("activations");
  PyObject* activations = own_attribute(module, name);
  return activations != nullptr && PyList_Check(activations) ? activations : nullptr;
}

inline Py_ssize_t captures_on(PyObject* module) noexcept {
  PyObject* activations = activations_of(module);
  return activations == nullptr ? 0 : PyList_GET_SIZE(activations);
}

}  // namespace opacus_memprof
