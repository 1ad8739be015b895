// SPDX-License-Identifier: Apache-2.0
#include "bindings/callables.h"

#include <pybind11/pybind11.h>

#include "bindings/callable.h"
#include "core/names.h"

namespace py = pybind11;

namespace opacus_memprof {

namespace {

// The id of a name; -1 with a Python error set.
long to_id(PyObject* object, Names::Kind kind, const char* what) {
  const long id = PyLong_AsLong(object);
  if (id == -1 && PyErr_Occurred() != nullptr) return -1;
  const auto limit = static_cast<long>(names().size(kind));
  if (id >= 0 && id < limit) return id;
  PyErr_Format(PyExc_ValueError, "a %s id is below %ld; take it from %s_id()", what, limit, what);
  return -1;
}

}  // namespace

PyObject* raise_current_exception() noexcept {
  try {
    throw;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

int to_tag(PyObject* object, void* tag) {
  const Tag* given = nullptr;  // as pybind11 gives None
  try {
    given = py::handle(object).cast<const Tag*>();
  } catch (const py::cast_error&) {
  }
  if (given == nullptr) {
    PyErr_Format(PyExc_TypeError, "a Tag is expected, not '%s'", Py_TYPE(object)->tp_name);
    return 0;
  }
  *static_cast<Tag*>(tag) = *given;
  return 1;
}

int to_module(PyObject* object, void* module) {
  const long id = to_id(object, Names::Kind::module, "module");
  if (id >= 0) *static_cast<std::uint16_t*>(module) = static_cast<std::uint16_t>(id);
  return static_cast<int>(id >= 0);
}

int to_category(PyObject* object, void* category) {
  const long id = to_id(object, Names::Kind::category, "category");
  if (id >= 0) *static_cast<std::uint8_t*>(category) = static_cast<std::uint8_t>(id);
  return static_cast<int>(id >= 0);
}

int to_callable(PyObject* object, void* callable) {
  if (PyCallable_Check(object) == 0) {
    PyErr_Format(PyExc_TypeError, "a callable is expected, not '%s'", Py_TYPE(object)->tp_name);
    return 0;
  }
  *static_cast<PyObject**>(callable) = object;
  return 1;
}

PyObject* reduce_to_wrapped(PyObject* self, PyObject* protocol) {
  PyObject* wrapped = PyObject_GetAttrString(self, "__wrapped__");
  if (wrapped == nullptr) return nullptr;
  PyObject* result = PyObject_CallMethod(wrapped, "__reduce_ex__", "O", protocol);
  Py_DECREF(wrapped);
  return result;
}

bool add_type(PyObject* module, PyType_Spec& spec, PyTypeObject** made) {
  auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (type == nullptr) return false;
  const bool added = PyModule_AddType(module, type) == 0;
  if (added && made != nullptr) *made = type;  // the module keeps it alive
  Py_DECREF(type);
  return added;
}

bool add_callables(PyObject* module) {
  return add_tagged(module) && add_scoped_forward(module) && add_capture_activations(module) &&
         add_capture_backprops(module) && add_sampler(module) && add_parameter_function(module) &&
         add_step_functions(module);
}

}  // namespace opacus_memprof
