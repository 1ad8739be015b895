// SPDX-License-Identifier: Apache-2.0
// CaptureActivations: Opacus' forward hook, and the tensors that it appends to
// `module.activations`.
#include "allocators/backward_position.h"
#include "hooks/arguments.h"
#include "hooks/attributes.h"
#include "hooks/captures.h"
#include "hooks/hooks.h"
#include "python/hook_type.h"

namespace py = pybind11;

namespace opacus_memprof {

namespace {

struct CaptureActivations {
  py::function wrapped;
  std::uint16_t module;
  // Called if the module captures again before a backward pass has used its last capture.
  py::function on_repeat;

  static constexpr const char* kName = "CaptureActivations";
  static constexpr auto arguments() {
    using Hook = CaptureActivations;
    return std::tuple(&Hook::wrapped, &Hook::module, &Hook::on_repeat);
  }

  [[gnu::hot]] PyObject* call(const Call& call) const {
    if (call.positional() == 0) return call.pass_to(wrapped);
    PyObject* layer = call.args[0];
    const Py_ssize_t before = captures_on(layer);
    auto result = py::reinterpret_steal<py::object>(call.pass_to(wrapped));
    if (!result) {
      report_refusal();
      return nullptr;
    }
    PyObject* activations = activations_of(layer);
    if (activations != nullptr && PyList_GET_SIZE(activations) > before)
      capture_newest(activations);
    return result.release().ptr();
  }

  [[gnu::hot]] void capture_newest(PyObject* activations) const {
    PyObject* newest = PyList_GET_ITEM(activations, PyList_GET_SIZE(activations) - 1);
    const auto tensors = py::reinterpret_steal<py::object>(
        PySequence_Fast(newest, "Opacus captures lists of tensors"));
    if (!tensors) throw py::error_already_set();
    capture_tensors(module, {PySequence_Fast_ITEMS(tensors.ptr()),
                             static_cast<std::size_t>(PySequence_Fast_GET_SIZE(tensors.ptr()))});
    // Activation checkpointing runs the forward again in backward.
    if (backward_task() >= 0) on_repeat(module, true, false);
  }

  // Ghost clipping refuses a second capture, with an error about tied parameters.
  void report_refusal() const {
    if (PyErr_ExceptionMatches(PyExc_NotImplementedError) == 0) return;
    const py::error_scope raised;
    PyObject* result = PyObject_CallFunction(on_repeat.ptr(), "iOO", static_cast<int>(module),
                                             backward_task() < 0 ? Py_False : Py_True, Py_True);
    Py_XDECREF(result);
  }

  [[nodiscard]] py::object reduce(py::handle protocol) const {
    return reduce_to(wrapped, protocol);
  }
};

}  // namespace

void add_capture_activations(py::module_& module) { HookType<CaptureActivations>::add(module); }

}  // namespace opacus_memprof
