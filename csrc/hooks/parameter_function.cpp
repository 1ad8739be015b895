// SPDX-License-Identifier: Apache-2.0
// ParameterFunction: a function whose first argument is (or has) a parameter, and which sets one of
// the parameter's attributes: per-sample gradients, a clipped sum.
#include "allocators/tensor.h"
#include "core/recorder.h"
#include "hooks/arguments.h"
#include "hooks/hooks.h"
#include "hooks/owners.h"
#include "hooks/python_tag.h"
#include "python/hook_type.h"

namespace py = pybind11;

namespace opacus_memprof {

namespace {

// Null if there is no such attribute.
[[gnu::hot]] py::object attribute(py::handle object, py::handle name) {
  PyObject* value = PyObject_GetAttr(object.ptr(), name.ptr());
  if (value == nullptr) {
    if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw py::error_already_set();
    PyErr_Clear();
  }
  return py::reinterpret_steal<py::object>(value);
}

struct ParameterFunction {
  py::function wrapped;
  Tag tag;
  py::str sets;  // the attribute's name
  std::uint8_t category;
  OrNone<py::str> via;  // the argument's attribute with the parameter; None: it is the parameter

  static constexpr const char* kName = "ParameterFunction";
  static constexpr auto arguments() {
    using F = ParameterFunction;
    return std::tuple(&F::wrapped, &F::tag, &F::sets, &F::category, &F::via);
  }

  [[gnu::hot]] PyObject* call(const Call& call) const {
    auto result = py::reinterpret_steal<py::object>(pass_under(tag, call, wrapped));
    if (result && call.positional() > 0) retag_result(call.args[0]);
    return result.release().ptr();
  }

  [[gnu::hot]] void retag_result(py::handle argument) const {
    const auto parameter =
        via.is_none() ? py::reinterpret_borrow<py::object>(argument) : attribute(argument, via);
    if (!parameter) return;
    // Also if it is a view of the output's gradient, because it keeps that alive until zero_grad.
    if (const auto set = attribute(parameter, sets)) {
      retag_tensor(set.ptr(), category, owner_of(parameter.ptr()), Recorder::kAnyCategory);
    }
  }
};

}  // namespace

void add_parameter_function(py::module_& module) { HookType<ParameterFunction>::add(module); }

}  // namespace opacus_memprof
