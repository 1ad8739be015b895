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

template <>
bool from_python(PyObject* object, Tag& tag) {
  if (!py::isinstance<Tag>(object)) return refuse(object, "a Tag");
  tag = py::handle(object).cast<const Tag&>();
  return true;
}

template <>
bool from_python(PyObject* object, std::uint8_t& category) {
  return to_id(object, names().size(Names::Kind::category), "category", category);
}

template <>
bool from_python(PyObject* object, std::uint16_t& module) {
  return to_id(object, names().size(Names::Kind::module), "module", module);
}

template <>
bool from_python(PyObject* object, ModuleOrKeep& module) {
  return object == Py_None || from_python(object, module.id);
}

template <>
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

template <>
bool from_python(PyObject* object, OpId& op) {
  return to_id(object, names().size(Names::Kind::op), "op", op.id);
}

template <>
bool from_python(PyObject* object, Phase& phase) {
  return to_id(object, kPhases, "phase", phase);
}

template <>
bool from_python(PyObject* object, ObjectId& id) {
  id.address = PyLong_AsSize_t(object);
  return PyErr_Occurred() == nullptr;
}

}  // namespace opacus_memprof
