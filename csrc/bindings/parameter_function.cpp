// SPDX-License-Identifier: Apache-2.0
// ParameterFunction: a function whose first argument is (or has) a parameter, and which sets one of
// the parameter's attributes: per-sample gradients, a clipped sum.
#include "adaptors/tensor.h"
#include "bindings/callable.h"
#include "bindings/owners.h"
#include "core/recorder.h"

namespace opacus_memprof {

namespace {

struct ParameterFunction {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* wrapped;
  PyObject* sets;  // the attribute's name
  PyObject* via;   // the name under which the argument has the parameter; None: it is the parameter
  Tag tag;
  std::uint8_t category;
};
using Slots = Collected<ParameterFunction, &ParameterFunction::wrapped, &ParameterFunction::sets,
                        &ParameterFunction::via>;

// nullptr without an error where there is no such attribute.
[[gnu::hot]] PyObject* attribute(PyObject* object, PyObject* name) {
  PyObject* value = PyObject_GetAttr(object, name);
  if (value == nullptr && PyErr_ExceptionMatches(PyExc_AttributeError) != 0) PyErr_Clear();
  return value;
}

[[gnu::hot]] void retag_result(const ParameterFunction* function, PyObject* argument) {
  PyObject* parameter =
      function->via == Py_None ? Py_NewRef(argument) : attribute(argument, function->via);
  if (parameter == nullptr) return;
  if (PyObject* set = attribute(parameter, function->sets); set != nullptr) {
    // Also where it is a view of the output's gradient: it keeps that alive until zero_grad.
    retag_tensor(set, function->category, owner_of(parameter), Recorder::kAnyCategory);
    Py_DECREF(set);
  }
  Py_DECREF(parameter);
}

[[gnu::hot]] PyObject* call(PyObject* self, PyObject* const* args, std::size_t flags,
                            PyObject* names) {
  auto* function = as<ParameterFunction>(self);
  PyObject* result = call_under(function->tag, function->wrapped, args, flags, names);
  if (result == nullptr || PyVectorcall_NARGS(flags) == 0) return result;
  retag_result(function, args[0]);
  if (PyErr_Occurred() != nullptr) Py_CLEAR(result);
  return result;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject* /*kwargs*/) {
  PyObject* wrapped = nullptr;
  PyObject* sets = nullptr;
  PyObject* via = nullptr;
  std::uint8_t category = 0;
  Tag tag;
  if (!PyArg_ParseTuple(args, "O&O&UO&O", to_callable, &wrapped, to_tag, &tag, &sets, to_category,
                        &category, &via)) {
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  auto* function = as<ParameterFunction>(self);
  function->vectorcall = call;
  function->wrapped = Py_NewRef(wrapped);
  function->sets = Py_NewRef(sets);
  function->via = Py_NewRef(via);
  function->tag = tag;
  function->category = category;
  return self;
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(ParameterFunction, vectorcall), READONLY,
     nullptr},
    {"__wrapped__", T_OBJECT, offsetof(ParameterFunction, wrapped), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("A function that sets an attribute of a parameter.")},
    slot(Py_tp_new, make),
    slot(Py_tp_dealloc, Slots::dealloc),
    slot(Py_tp_traverse, Slots::traverse),
    slot(Py_tp_clear, Slots::clear),
    slot(Py_tp_call, PyVectorcall_Call),
    {Py_tp_members, members},
    {0, nullptr},
};

PyType_Spec spec = {"opacus_memprof._C.ParameterFunction", sizeof(ParameterFunction), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};

}  // namespace

bool add_parameter_function(PyObject* module) { return add_type(module, spec); }

}  // namespace opacus_memprof
