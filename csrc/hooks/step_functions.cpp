// SPDX-License-Identifier: Apache-2.0
// What hooks call in every step: CPython's own functions (arguments.h says why), which _C.pyi
// describes.
#include "allocators/tensor.h"
#include "core/recorder.h"
#include "core/tag_stack.h"
#include "hooks/arguments.h"
#include "hooks/attributes.h"
#include "hooks/gradient_hook.h"
#include "hooks/hooks.h"
#include "hooks/inputs.h"
#include "hooks/owners.h"
#include "hooks/tensors_in.h"

namespace py = pybind11;

namespace opacus_memprof {

namespace {

int set_phase(Phase phase) {
  const Phase before = this_thread().phase();
  recorder().set_phase(phase);
  return static_cast<int>(before);
}

void set_second_backward(bool on) { backward_state.set_second(on); }

void end_step(bool logical) { recorder().end_step(logical); }

std::uint16_t owner(py::handle parameter) { return owner_of(parameter.ptr()); }

py::object captures() {
  py::dict result;
  for (const auto& [module, count] : outstanding_captures()) result[py::int_(module)] = count;
  return result;
}

py::object inputs(py::handle batch) {
  const auto [samples, elements] = tag_inputs(batch.ptr());
  return py::make_tuple(samples, elements);
}

void target(py::handle tensor) { tag_target(tensor.ptr()); }

void settle_all(py::handle outputs) { settle_all_captures(TensorsIn(outputs).all()); }

std::uint64_t retag(py::handle tensors, std::uint8_t category, ModuleOrKeep module) {
  return retag_tensors(tensors, category, module.id, Recorder::kAnyCategory);
}

std::uint64_t retag_first_state(py::handle states, std::uint8_t category) {
  if (!PyDict_Check(states.ptr())) throw py::type_error("states are a dict by parameter");
  Py_ssize_t position = 0;
  PyObject* parameter = nullptr;
  PyObject* state = nullptr;
  if (PyDict_Next(states.ptr(), &position, &parameter, &state) == 0) return 0;
  const auto nested = py::make_tuple(py::handle(state));
  return retag_tensors(nested, category, owner_of(parameter), Recorder::kAnyCategory);
}

std::uint64_t retag_gradients(py::handle parameters, std::uint8_t category) {
  const TensorsIn found(parameters);
  for (PyObject* parameter : found) prefetch_block_of_gradient(parameter);
  std::uint64_t bytes = 0;
  for (PyObject* parameter : found) {
    bytes += retag_gradient(parameter, category, owner_of(parameter));
  }
  return bytes;
}

std::uint64_t retag_attribute(py::handle parameters, const py::str& name, std::uint8_t category) {
  const TensorsIn found(parameters);
  std::vector<std::pair<PyObject*, std::uint16_t>> tensors;  // and their parameters' owners
  tensors.reserve(found.all().size());
  for (PyObject* parameter : found) {
    PyObject* tensor = own_attribute(parameter, name.ptr());
    if (tensor == nullptr) continue;
    prefetch_block_of(tensor);
    tensors.emplace_back(tensor, owner_of(parameter));
  }
  std::uint64_t bytes = 0;
  for (const auto& [tensor, module] : tensors) {
    bytes += retag_tensor(tensor, category, module, Recorder::kAnyCategory);
  }
  return bytes;
}

PyMethodDef functions[] = {
    method<set_phase>("set_phase"),
    method<set_second_backward>("set_second_backward"),
    method<end_step>("end_step"),
    method<owner>("owner_of"),
    method<gradient_hooks_lost>("gradient_hooks_lost"),
    method<captures>("captures"),
    method<inputs>("tag_inputs"),
    method<target>("tag_target"),
    method<settle_all>("settle_all"),
    method<retag>("retag"),
    method<retag_first_state>("retag_first_state"),
    method<retag_gradients>("retag_gradients"),
    method<retag_attribute>("retag_attribute"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void add_step_functions(py::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), functions) != 0) throw py::error_already_set();
}

}  // namespace opacus_memprof
