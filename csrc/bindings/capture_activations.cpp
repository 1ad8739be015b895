// SPDX-License-Identifier: Apache-2.0
// CaptureActivations: Opacus' forward hook, and what it has appended to `module.activations`.
#include <pybind11/pybind11.h>

#include "adaptors/autograd_position.h"
#include "adaptors/tensor.h"
#include "bindings/attributes.h"
#include "bindings/callable.h"

namespace opacus_memprof {

namespace {

struct CaptureActivations {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* wrapped;
  PyObject* again;
  std::uint16_t module;
};
using Slots =
    Collected<CaptureActivations, &CaptureActivations::wrapped, &CaptureActivations::again>;

// A module's forward runs again before a backward has used its captures. False with a Python error
// set.
bool tell(const CaptureActivations* hook, bool refused) {
  PyObject* told =
      PyObject_CallFunction(hook->again, "iOO", static_cast<int>(hook->module),
                            backward_task() < 0 ? Py_False : Py_True, refused ? Py_True : Py_False);
  Py_XDECREF(told);
  return told != nullptr;
}

// The newest entry's tensors. False with a Python error set.
[[gnu::hot]] bool note_capture(const CaptureActivations* hook, PyObject* activations) {
  PyObject* newest = PyList_GET_ITEM(activations, PyList_GET_SIZE(activations) - 1);
  PyObject* tensors = PySequence_Fast(newest, "Opacus captures lists of tensors");
  if (tensors == nullptr) return false;
  bool done = true;
  try {
    capture_tensors(hook->module, {PySequence_Fast_ITEMS(tensors),
                                   static_cast<std::size_t>(PySequence_Fast_GET_SIZE(tensors))});
  } catch (...) {
    raise_current_exception();
    done = false;
  }
  Py_DECREF(tensors);
  // Activation checkpointing runs the forward again in backward.
  return done && (backward_task() < 0 || tell(hook, false));
}

// Ghost clipping refuses a second capture, with an error that speaks of tied parameters.
void note_refusal(const CaptureActivations* hook) {
  if (PyErr_ExceptionMatches(PyExc_NotImplementedError) == 0) return;
  const pybind11::error_scope raised;
  tell(hook, true);
}

[[gnu::hot]] PyObject* call(PyObject* self, PyObject* const* args, std::size_t flags,
                            PyObject* names) {
  auto* hook = as<CaptureActivations>(self);
  if (PyVectorcall_NARGS(flags) == 0) return PyObject_Vectorcall(hook->wrapped, args, flags, names);
  PyObject* module = args[0];
  const Py_ssize_t held = captures_on(module);
  PyObject* result = PyObject_Vectorcall(hook->wrapped, args, flags, names);
  if (result == nullptr) {
    note_refusal(hook);
    return nullptr;
  }
  PyObject* activations = activations_of(module);
  if (activations != nullptr && PyList_GET_SIZE(activations) > held &&
      !note_capture(hook, activations)) {
    Py_CLEAR(result);
  }
  return result;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject* /*kwargs*/) {
  PyObject* wrapped = nullptr;
  std::uint16_t module = 0;
  PyObject* again = nullptr;
  if (!PyArg_ParseTuple(args, "O&O&O&", to_callable, &wrapped, to_module, &module, to_callable,
                        &again)) {
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  auto* hook = as<CaptureActivations>(self);
  hook->vectorcall = call;
  hook->wrapped = Py_NewRef(wrapped);
  hook->again = Py_NewRef(again);
  hook->module = module;
  return self;
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(CaptureActivations, vectorcall), READONLY,
     nullptr},
    {"__wrapped__", T_OBJECT, offsetof(CaptureActivations, wrapped), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyMethodDef methods[] = {
    {"__reduce_ex__", reduce_to_wrapped, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("Opacus' forward hook, and what it has captured.")},
    slot(Py_tp_new, make),
    slot(Py_tp_dealloc, Slots::dealloc),
    slot(Py_tp_traverse, Slots::traverse),
    slot(Py_tp_clear, Slots::clear),
    slot(Py_tp_call, PyVectorcall_Call),
    {Py_tp_members, members},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec spec = {"opacus_memprof._C.CaptureActivations", sizeof(CaptureActivations), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};

}  // namespace

bool add_capture_activations(PyObject* module) { return add_type(module, spec); }

}  // namespace opacus_memprof
