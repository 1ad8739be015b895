// SPDX-License-Identifier: Apache-2.0
// The functions that opacus_memprof/hooks calls: plain CPython functions in one table. Most are
// called in every step, for which pybind11 is too slow (python/arguments.h says why). _C.pyi
// documents each.
#include "allocators/tensor.h"
#include "core/names.h"
#include "core/recorder.h"
#include "core/tag_stack.h"
#include "hooks/arguments.h"
#include "hooks/attributes.h"
#include "hooks/captures.h"
#include "hooks/gradient_hook.h"
#include "hooks/hooks.h"
#include "hooks/inputs.h"
#include "hooks/owners.h"
#include "hooks/tensors_in.h"

namespace py = pybind11;

namespace opacus_memprof {

namespace {

// --- the activity of training ---

// Returns the previous phase.
int set_phase(Phase phase) {
  const Phase before = this_thread().phase();
  recorder().set_phase(phase);
  return static_cast<int>(before);
}

void set_second_backward(bool on) { backward_state.set_second(on); }

void end_step(bool logical) { recorder().end_step(logical); }

// --- modules and parameters ---

void set_component(std::uint16_t module, const py::str& component) {
  names().set_component(module, std::string(component));
}

void set_parameter_owner(py::handle parameter, std::uint16_t module) {
  set_owner(parameter.ptr(), module);
}

void remove_parameter_owner(ObjectId parameter) { remove_owner(parameter.address); }

std::uint16_t owner_of_parameter(py::handle parameter) { return owner_of(parameter.ptr()); }

void follow_parameter_gradient(py::handle parameter, std::uint16_t module) {
  follow_gradient(parameter.ptr(), module);
}

void unfollow_parameter_gradient(py::handle parameter) { unfollow_gradient(parameter.ptr()); }

// --- inputs ---

py::object tag_batch(py::handle batch) {
  const auto [samples, elements] = tag_inputs(batch.ptr());
  return py::make_tuple(samples, elements);
}

void tag_loss_target(py::handle tensor) { tag_target(tensor.ptr()); }

// --- captures ---

void capture(std::uint16_t module, py::handle tensors) {
  capture_tensors(module, TensorsIn(tensors).all());
}

void settle_all(py::handle outputs) { settle_all_captures(TensorsIn(outputs).all()); }

py::object captures() {
  py::dict result;
  for (const auto& [module, count] : outstanding_captures()) result[py::int_(module)] = count;
  return result;
}

// --- tensors, and the blocks under them ---

py::object tensors_in(py::handle value) {
  const TensorsIn found(value);
  py::list result(found.all().size());
  std::size_t index = 0;
  for (PyObject* tensor : found) result[index++] = py::handle(tensor);
  return result;
}

std::uint64_t retag(py::handle tensors, std::uint8_t category, ModuleOrKeep module) {
  return retag_tensors(tensors, category, module.id, Recorder::kAnyCategory);
}

std::uint64_t retag_if(py::handle tensors, CategorySet expected, std::uint8_t category,
                       ModuleOrKeep module) {
  return retag_tensors(tensors, category, module.id, expected.bits);
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
  std::vector<std::pair<PyObject*, std::uint16_t>> tensors;  // each with its parameter's owner
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
    method<set_component>("set_component"),
    method<set_parameter_owner>("set_owner"),
    method<remove_parameter_owner>("remove_owner"),
    method<owner_of_parameter>("owner_of"),
    method<follow_parameter_gradient>("follow_gradient"),
    method<unfollow_parameter_gradient>("unfollow_gradient"),
    method<gradient_hooks_lost>("gradient_hooks_lost"),
    method<tag_batch>("tag_inputs"),
    method<tag_loss_target>("tag_target"),
    method<capture>("capture"),
    method<release_captures>("release"),
    method<settle_captures>("settle"),
    method<settle_all>("settle_all"),
    method<captures>("captures"),
    method<tensors_in>("tensors_in"),
    method<retag>("retag"),
    method<retag_if>("retag_if"),
    method<retag_first_state>("retag_first_state"),
    method<retag_gradients>("retag_gradients"),
    method<retag_attribute>("retag_attribute"),
    method<forget_observed_shapes>("forget_observed_shapes"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void add_functions(py::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), functions) != 0) throw py::error_already_set();
}

}  // namespace opacus_memprof
