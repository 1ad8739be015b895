// SPDX-License-Identifier: Apache-2.0
// What hooks call in every step. They are functions as CPython has them: between two of them a
// training step runs enough code to evict pybind11's way of calling, which then takes several times
// as long as they do.
#include <pybind11/pybind11.h>

#include "adaptors/gradient_hook.h"
#include "adaptors/tensor.h"
#include "bindings/attributes.h"
#include "bindings/callable.h"
#include "bindings/inputs.h"
#include "bindings/owners.h"
#include "bindings/tensors_in.h"
#include "core/recorder.h"
#include "core/tag_stack.h"

namespace opacus_memprof {

namespace {

// A function of one argument, or of a tuple of them, which may throw.
template <PyObject* (*function)(PyObject*)>
PyObject* guarded(PyObject* /*module*/, PyObject* argument) noexcept {
  try {
    return function(argument);
  } catch (...) {
    return raise_current_exception();
  }
}

template <typename... Out>
void parse(PyObject* arguments, const char* format, Out... out) {
  if (PyArg_ParseTuple(arguments, format, out...) == 0) throw pybind11::error_already_set();
}

PyObject* number(std::uint64_t value) { return PyLong_FromUnsignedLongLong(value); }

int to_module_or_keep(PyObject* object, void* module) {
  return object == Py_None ? 1 : to_module(object, module);
}

bool truth(PyObject* object) {
  const int is = PyObject_IsTrue(object);
  if (is < 0) throw pybind11::error_already_set();
  return is != 0;
}

PyObject* set_phase(PyObject* phase) {
  const long id = PyLong_AsLong(phase);
  if (id == -1 && PyErr_Occurred() != nullptr) return nullptr;
  if (id < 0 || static_cast<std::size_t>(id) >= kPhases) {
    return PyErr_Format(PyExc_ValueError, "phase id out of range: %ld", id);
  }
  const Phase before = this_thread().phase();
  recorder().set_phase(static_cast<Phase>(id));
  return number(static_cast<std::uint64_t>(before));
}

PyObject* set_second_backward(PyObject* on) {
  backward_state.set_second(truth(on));
  Py_RETURN_NONE;
}

PyObject* end_step(PyObject* logical) {
  recorder().end_step(truth(logical));
  Py_RETURN_NONE;
}

PyObject* owner(PyObject* parameter) { return number(owner_of(parameter)); }

PyObject* hooks_lost(PyObject* /*none*/) { return number(gradient_hooks_lost()); }

PyObject* captures(PyObject* /*none*/) {
  pybind11::dict result;
  for (const auto& [module, count] : outstanding_captures()) {
    result[pybind11::int_(module)] = count;
  }
  return result.release().ptr();
}

PyObject* inputs(PyObject* batch) {
  const auto [samples, elements] = tag_inputs(batch);
  return Py_BuildValue("LL", static_cast<long long>(samples), static_cast<long long>(elements));
}

PyObject* target(PyObject* tensor) {
  tag_target(tensor);
  Py_RETURN_NONE;
}

PyObject* settle_all(PyObject* outputs) {
  settle_all_captures(TensorsIn(outputs).all());
  Py_RETURN_NONE;
}

PyObject* retag(PyObject* arguments) {
  PyObject* tensors = nullptr;
  std::uint8_t category = 0;
  std::uint16_t module = kKeep16;
  parse(arguments, "OO&|O&", &tensors, to_category, &category, to_module_or_keep, &module);
  return number(retag_tensors(tensors, category, module, Recorder::kAnyCategory));
}

PyObject* retag_first_state(PyObject* arguments) {
  PyObject* states = nullptr;
  std::uint8_t category = 0;
  parse(arguments, "O!O&", &PyDict_Type, &states, to_category, &category);
  Py_ssize_t position = 0;
  PyObject* parameter = nullptr;
  PyObject* state = nullptr;
  if (PyDict_Next(states, &position, &parameter, &state) == 0) return number(0);
  const auto nested = pybind11::make_tuple(pybind11::handle(state));
  return number(retag_tensors(nested, category, owner_of(parameter), Recorder::kAnyCategory));
}

PyObject* retag_gradients(PyObject* arguments) {
  PyObject* parameters = nullptr;
  std::uint8_t category = 0;
  parse(arguments, "OO&", &parameters, to_category, &category);
  const TensorsIn found(parameters);
  for (PyObject* parameter : found) prefetch_block_of_gradient(parameter);
  std::uint64_t bytes = 0;
  for (PyObject* parameter : found) {
    bytes += retag_gradient(parameter, category, owner_of(parameter));
  }
  return number(bytes);
}

PyObject* retag_attribute(PyObject* arguments) {
  PyObject* parameters = nullptr;
  PyObject* name = nullptr;
  std::uint8_t category = 0;
  parse(arguments, "OUO&", &parameters, &name, to_category, &category);
  const TensorsIn found(parameters);
  std::vector<std::pair<PyObject*, std::uint16_t>> held;  // and its parameter's owner
  held.reserve(found.all().size());
  for (PyObject* parameter : found) {
    PyObject* tensor = own_attribute(parameter, name);
    if (tensor == nullptr) continue;
    prefetch_block_of(tensor);
    held.emplace_back(tensor, owner_of(parameter));
  }
  std::uint64_t bytes = 0;
  for (const auto& [tensor, module] : held) {
    bytes += retag_tensor(tensor, category, module, Recorder::kAnyCategory);
  }
  return number(bytes);
}

PyMethodDef functions[] = {
    {"set_phase", guarded<set_phase>, METH_O, nullptr},
    {"set_second_backward", guarded<set_second_backward>, METH_O, nullptr},
    {"end_step", guarded<end_step>, METH_O, nullptr},
    {"owner_of", guarded<owner>, METH_O, nullptr},
    {"gradient_hooks_lost", guarded<hooks_lost>, METH_NOARGS, nullptr},
    {"captures", guarded<captures>, METH_NOARGS, nullptr},
    {"tag_inputs", guarded<inputs>, METH_O, nullptr},
    {"tag_target", guarded<target>, METH_O, nullptr},
    {"settle_all", guarded<settle_all>, METH_O, nullptr},
    {"retag", guarded<retag>, METH_VARARGS, nullptr},
    {"retag_first_state", guarded<retag_first_state>, METH_VARARGS, nullptr},
    {"retag_gradients", guarded<retag_gradients>, METH_VARARGS, nullptr},
    {"retag_attribute", guarded<retag_attribute>, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_step_functions(PyObject* module) { return PyModule_AddFunctions(module, functions) == 0; }

}  // namespace opacus_memprof
