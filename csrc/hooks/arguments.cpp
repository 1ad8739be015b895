// SPDX-License-Identifier: Apache-2.0
#include "hooks/arguments.h"

#include <optional>

#include "core/names.h"

namespace py = pybind11;

namespace opacus_memprof {

namespace {

// Returns nullopt, with a Python error set, if it is not such an id.
std::optional<long> id_below(PyObject* object, std::size_t limit, const char* what) {
  const long id = PyLong_AsLong(object);
  if (id == -1 && PyErr_Occurred() != nullptr) return std::nullopt;
  if (id >= 0 && static_cast<std::size_t>(id) < limit) return id;
  PyErr_Format(PyExc_ValueError, "a %s id is below %zu; take it from %s_id()", what, limit, what);
  return std::nullopt;
}

template <typename Id>
bool to_id(PyObject* object, std::size_t limit, const char* what, Id& to) {
  const auto id = id_below(object, limit, what);
  if (id) to = static_cast<Id>(*id);
  return id.has_value();
}

}  // namespace

PyObject* raise_current_exception() {
  try {
    throw;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
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

bool from_python(PyObject* object, Tag& tag) {
  if (!py::isinstance<Tag>(object)) return refuse(object, "a Tag");
  tag = py::handle(object).cast<const Tag&>();
  return true;
}

bool from_python(PyObject* object, std::uint8_t& category) {
  return to_id(object, names().size(Names::Kind::category), "category", category);
}

bool from_python(PyObject* object, std::uint16_t& module) {
  return to_id(object, names().size(Names::Kind::module), "module", module);
}

bool from_python(PyObject* object, ModuleOrKeep& module) {
  return object == Py_None || from_python(object, module.id);
}

bool from_python(PyObject* object, CategorySet& categories) {
  const auto ids = py::reinterpret_steal<py::object>(
      PySequence_Fast(object, "a sequence of category ids is expected"));
  if (!ids) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(ids.ptr()); ++i) {
    std::uint8_t category = 0;
    if (!from_python(PySequence_Fast_GET_ITEM(ids.ptr(), i), category)) return false;
    categories.bits |= std::uint64_t{1} << category;
  }
  return true;
}

bool from_python(PyObject* object, OpId& op) {
  return to_id(object, names().size(Names::Kind::op), "op", op.id);
}

bool from_python(PyObject* object, Phase& phase) { return to_id(object, kPhases, "phase", phase); }

bool from_python(PyObject* object, ObjectId& id) {
  id.address = PyLong_AsSize_t(object);
  return PyErr_Occurred() == nullptr;
}

bool from_python(PyObject* object, bool& value) {
  const int is = PyObject_IsTrue(object);
  value = is == 1;
  return is >= 0;
}

}  // namespace opacus_memprof
