// SPDX-License-Identifier: Apache-2.0
#include "python/arguments.h"

#include <exception>
#include <new>

namespace opacus_memprof {

PyObject* raise_current_exception() {
  try {
    throw;
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (const pybind11::builtin_exception& error) {
    error.set_error();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    // torch's python_error means that a Python error is already set; its what() is empty.
    if (PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

bool refuse(PyObject* object, const char* expected) {
  PyErr_Format(PyExc_TypeError, "%s is expected, not '%s'", expected, Py_TYPE(object)->tp_name);
  return false;
}

template <>
bool from_python(PyObject* object, bool& value) {
  const int is = PyObject_IsTrue(object);
  value = is == 1;
  return is >= 0;
}

}  // namespace opacus_memprof
