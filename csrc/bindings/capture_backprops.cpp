// SPDX-License-Identifier: Apache-2.0
// CaptureBackprops: Opacus' full backward hook. The module's own backward has run: autograd has let
// go of what it saved. What the hook allocates is under one tag until its sampler has returned, and
// under another one from then on.
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
  Tag before;
  Tag after;
  std::uint16_t module;
};
using Slots = Collected<CaptureBackprops, &CaptureBackprops::wrapped>;

thread_local const CaptureBackprops* running = nullptr;

// The length of a hook's call.
class Running {
 public:
  explicit Running(const CaptureBackprops* hook) : scope_(hook->before), outer_(running) {
    running = hook;
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
  ~Running() { running = outer_; }

 private:
  TagScope scope_;
  const CaptureBackprops* outer_;
};

[[gnu::hot]] PyObject* run(const CaptureBackprops* hook, PyObject* const* args, std::size_t flags,
                           PyObject* names) {
  const Running here(hook);
  return PyObject_Vectorcall(hook->wrapped, args, flags, names);
}

[[gnu::hot]] PyObject* call(PyObject* self, PyObject* const* args, std::size_t flags,
                            PyObject* names) {
  auto* hook = as<CaptureBackprops>(self);
  const Py_ssize_t held = PyVectorcall_NARGS(flags) == 0 ? 0 : captures_on(args[0]);
  // Nothing was captured, or this is ghost clipping's second pass.
  if (held == 0) return PyObject_Vectorcall(hook->wrapped, args, flags, names);
  settle_captures(hook->module);
  PyObject* result = run(hook, args, flags, names);
  const pybind11::error_scope kept;  // what the hook has raised, if it has
  if (captures_on(args[0]) < held) release_captures(hook->module);
  return result;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject* /*kwargs*/) {
  PyObject* wrapped = nullptr;
  std::uint16_t module = 0;
  Tag before;
  Tag after;
  if (!PyArg_ParseTuple(args, "O&O&O&O&", to_callable, &wrapped, to_module, &module, to_tag,
                        &before, to_tag, &after)) {
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  auto* hook = as<CaptureBackprops>(self);
  hook->vectorcall = call;
  hook->wrapped = Py_NewRef(wrapped);
  hook->before = before;
  hook->after = after;
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

void sampled() noexcept {
  if (running != nullptr) this_thread().change(running->after);
}

bool add_capture_backprops(PyObject* module) { return add_type(module, spec); }

}  // namespace opacus_memprof
