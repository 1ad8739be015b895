// SPDX-License-Identifier: Apache-2.0
// GradientHook: a parameter's post-accumulate-grad hook.
#include "adaptors/tensor.h"
#include "bindings/callable.h"
#include "core/vocabulary.h"

namespace opacus_memprof {

namespace {

struct GradientHook {
  PyObject_HEAD vectorcallfunc vectorcall;
  std::uint16_t module;
};

PyObject* call(PyObject* self, PyObject* const* args, std::size_t flags, PyObject* /*names*/) {
  if (PyVectorcall_NARGS(flags) > 0) {
    retag_gradient(args[0], static_cast<std::uint8_t>(Category::gradients),
                   as<GradientHook>(self)->module);
  }
  Py_RETURN_NONE;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject* /*kwargs*/) {
  std::uint16_t module = 0;
  if (!PyArg_ParseTuple(args, "O&", to_module, &module)) return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  as<GradientHook>(self)->vectorcall = call;
  as<GradientHook>(self)->module = module;
  return self;
}

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(GradientHook, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("A post-accumulate-grad hook: the gradient is one.")},
    slot(Py_tp_new, make),
    slot(Py_tp_dealloc, dealloc),
    slot(Py_tp_call, PyVectorcall_Call),
    {Py_tp_members, members},
    {0, nullptr},
};

PyType_Spec spec = {"opacus_memprof._C.GradientHook", sizeof(GradientHook), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};

}  // namespace

bool add_gradient_hook(PyObject* module) { return add_type(module, spec); }

}  // namespace opacus_memprof
