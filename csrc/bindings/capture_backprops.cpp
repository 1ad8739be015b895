// SPDX-License-Identifier: Apache-2.0
// CaptureBackprops: Opacus' full backward hook. The module's own backward has run: autograd has let
// go of what it saved.
#include <pybind11/pybind11.h>

#include "adaptors/tensor.h"
#include "bindings/attributes.h"
#include "bindings/callable.h"
#include "core/tag_stack.h"

namespace opacus_memprof {

namespace {

struct CaptureBackprops {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* wrapped;
  Tag tag;
  std::uint16_t module;
};
using Slots = Collected<CaptureBackprops, &CaptureBackprops::wrapped>;

PyObject* call_under(Tag tag, PyObject* function, PyObject* const* args, std::size_t flags,
                     PyObject* names) {
  const TagScope scope(tag);
  return PyObject_Vectorcall(function, args, flags, names);
}

[[gnu::hot]] PyObject* call(PyObject* self, PyObject* const* args, std::size_t flags,
                            PyObject* names) {
  auto* hook = as<CaptureBackprops>(self);
  const Py_ssize_t held = PyVectorcall_NARGS(flags) == 0 ? 0 : captures_on(args[0]);
  // Nothing was captured, or this is ghost clipping's second pass.
  if (held == 0) return PyObject_Vectorcall(hook->wrapped, args, flags, names);
  settle_captures(hook->module);
  PyObject* result = call_under(hook->tag, hook->wrapped, args, flags, names);
  const pybind11::error_scope kept;  // what the hook has raised, if it has
  if (captures_on(args[0]) < held) release_captures(hook->module);
  return result;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject* /*kwargs*/) {
  PyObject* wrapped = nullptr;
  std::uint16_t module = 0;
  Tag tag;
  if (!PyArg_ParseTuple(args, "O&O&O&", to_callable, &wrapped, to_module, &module, to_tag, &tag)) {
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  auto* hook = as<CaptureBackprops>(self);
  hook->vectorcall = call;
  hook->wrapped = Py_NewRef(wrapped);
  hook->tag = tag;
  hook->module = module;
  return self;
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(CaptureBackprops, vectorcall), READONLY, nullptr},
    {"__wrapped__", T_OBJECT, offsetof(CaptureBackprops, wrapped), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyMethodDef methods[] = {
    {"__reduce_ex__", reduce_to_wrapped, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("Opacus' full backward hook.")},
    slot(Py_tp_new, make),
    slot(Py_tp_dealloc, Slots::dealloc),
    slot(Py_tp_traverse, Slots::traverse),
    slot(Py_tp_clear, Slots::clear),
    slot(Py_tp_call, PyVectorcall_Call),
    {Py_tp_members, members},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec spec = {"opacus_memprof._C.CaptureBackprops", sizeof(CaptureBackprops), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};

}  // namespace

bool add_capture_backprops(PyObject* module) { return add_type(module, spec); }

}  // namespace opacus_memprof
