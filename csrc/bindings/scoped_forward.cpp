// SPDX-License-Identifier: Apache-2.0
// ScopedForward: a module's `forward` under the module's tag.
//
// It stands in the module's __dict__ and so must not own the module: a cycle would keep the model's
// memory until a garbage collection. It holds the class' function and a weak reference instead.
// (A forward hook would cost several times as much: one hook sends every call of the module down
// torch's slow path.)
#include <algorithm>
#include <array>
#include <vector>

#include "adaptors/autograd_position.h"
#include "bindings/callable.h"

namespace opacus_memprof {

namespace {

struct ScopedForward {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* function;   // unbound, from the class; or whatever stood in the __dict__, which is
                        // called as it is
  PyObject* reference;  // weak, to the module
  PyObject* weak_references;
  std::uint16_t module;
  char bind;
};
using Slots = Collected<ScopedForward, &ScopedForward::function, &ScopedForward::reference>;

// A new reference; nullptr with ReferenceError set if the module is gone.
PyObject* module_of(const ScopedForward* scoped) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* module = nullptr;
  if (PyWeakref_GetRef(scoped->reference, &module) < 0) return nullptr;
  if (module != nullptr) return module;
#else
  PyObject* module = PyWeakref_GetObject(scoped->reference);
  if (module == nullptr || module != Py_None) return Py_XNewRef(module);
#endif
  PyErr_SetString(PyExc_ReferenceError, "the module of this forward is gone");
  return nullptr;
}

[[gnu::hot]] PyObject* call_bound(PyObject* function, PyObject* module, PyObject* const* args,
                                  std::size_t flags, PyObject* names) {
  const auto positional = static_cast<std::size_t>(PyVectorcall_NARGS(flags));
  const std::size_t count =
      positional + (names == nullptr ? 0 : static_cast<std::size_t>(PyTuple_GET_SIZE(names)));
  std::array<PyObject*, 8> few;
  std::vector<PyObject*> many;
  PyObject** all = few.data();
  if (count + 1 > few.size()) {
    many.resize(count + 1);
    all = many.data();
  }
  all[0] = module;
  std::copy_n(args, count, all + 1);
  return PyObject_Vectorcall(function, all, positional + 1, names);
}

[[gnu::hot]] PyObject* call(PyObject* self, PyObject* const* args, std::size_t flags,
                            PyObject* names) {
  auto* scoped = as<ScopedForward>(self);
  ModuleScope scope(scoped->module);
  PyObject* result = nullptr;
  if (scoped->bind == 0) {
    result = PyObject_Vectorcall(scoped->function, args, flags, names);
  } else if (PyObject* module = module_of(scoped); module != nullptr) {
    result = call_bound(scoped->function, module, args, flags, names);
    Py_DECREF(module);
  }
  if (result == nullptr) scope.fail();
  return result;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject* /*kwargs*/) {
  PyObject* function = nullptr;
  PyObject* reference = nullptr;
  std::uint16_t module = 0;
  int bind = 0;
  if (!PyArg_ParseTuple(args, "O&OO&p", to_callable, &function, &reference, to_module, &module,
                        &bind)) {
    return nullptr;
  }
  if (!PyWeakref_Check(reference)) {
    PyErr_SetString(PyExc_TypeError,
                    "ScopedForward(function, weak reference, module id, bind) expected");
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  auto* scoped = as<ScopedForward>(self);
  scoped->vectorcall = call;
  scoped->function = Py_NewRef(function);
  scoped->reference = Py_NewRef(reference);
  scoped->module = module;
  scoped->bind = static_cast<char>(bind != 0);
  scoped->weak_references = nullptr;
  return self;
}

// What stands behind it, bound: for inspect.signature and whoever unwraps.
PyObject* wrapped_of(PyObject* self, void* /*closure*/) {
  auto* scoped = as<ScopedForward>(self);
  if (scoped->bind == 0) return Py_NewRef(scoped->function);
  PyObject* module = module_of(scoped);
  if (module == nullptr) return nullptr;
  PyObject* method = PyMethod_New(scoped->function, module);
  Py_DECREF(module);
  return method;
}

PyObject* getattro(PyObject* self, PyObject* name) {
  if (PyObject* own = PyObject_GenericGetAttr(self, name); own != nullptr) return own;
  if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) return nullptr;
  PyErr_Clear();
  PyObject* wrapped = wrapped_of(self, nullptr);
  if (wrapped == nullptr) return nullptr;
  PyObject* value = PyObject_GetAttr(wrapped, name);
  Py_DECREF(wrapped);
  return value;
}

// A pickle or deep copy of a model carries its plain forward: copies are not profiled.
PyObject* reduce_ex(PyObject* self, PyObject* protocol) {
  if (as<ScopedForward>(self)->bind == 0) return reduce_to_wrapped(self, protocol);
  PyObject* module = module_of(as<ScopedForward>(self));
  if (module == nullptr) return nullptr;
  PyObject* getattr = PyDict_GetItemString(PyEval_GetBuiltins(), "getattr");
  PyObject* result = Py_BuildValue("O(Os)", getattr, module, "forward");
  Py_DECREF(module);
  return result;
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(ScopedForward, vectorcall), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(ScopedForward, weak_references), READONLY, nullptr},
    {"bound_by_class", T_BOOL, offsetof(ScopedForward, bind), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"__wrapped__", wrapped_of, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef methods[] = {
    {"__reduce_ex__", reduce_ex, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("A module's forward under the module's tag.")},
    slot(Py_tp_new, make),
    slot(Py_tp_dealloc, Slots::dealloc),
    slot(Py_tp_traverse, Slots::traverse),
    slot(Py_tp_clear, Slots::clear),
    slot(Py_tp_call, PyVectorcall_Call),
    slot(Py_tp_getattro, getattro),
    {Py_tp_members, members},
    {Py_tp_getset, properties},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec spec = {"opacus_memprof._C.ScopedForward", sizeof(ScopedForward), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};

}  // namespace

bool add_scoped_forward(PyObject* module) { return add_type(module, spec); }

}  // namespace opacus_memprof
