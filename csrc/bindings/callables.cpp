// SPDX-License-Identifier: Apache-2.0
#include "bindings/callables.h"

#include <structmember.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "adaptors/autograd_position.h"
#include "adaptors/tensor.h"
#include "core/tag_stack.h"

namespace opacus_memprof {

namespace {

// ---- Tagged: runs a callable under a tag ----

struct Tagged {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* wrapped;
  PyObject* tag_object;
  Tag tag;
};

PyTypeObject* tagged_type = nullptr;

PyObject* tagged_call(PyObject* self, PyObject* const* args, std::size_t count, PyObject* names) {
  auto* tagged = reinterpret_cast<Tagged*>(self);
  ThreadTags& tags = this_thread();
  const std::size_t depth = tags.depth();
  tags.push(tagged->tag);
  PyObject* result = PyObject_Vectorcall(tagged->wrapped, args, count, names);
  tags.unwind(depth);  // also what the call left behind by raising
  return result;
}

PyObject* tagged_new(PyTypeObject* /*type*/, PyObject* args, PyObject* /*kwargs*/) {
  PyObject* tag = nullptr;
  PyObject* function = nullptr;
  if (!PyArg_ParseTuple(args, "OO", &tag, &function)) return nullptr;
  return PyObject_CallOneArg(tag, function);  // Tag.__call__ knows its own tag
}

int tagged_traverse(PyObject* self, visitproc visit, void* arg) {
  auto* tagged = reinterpret_cast<Tagged*>(self);
  Py_VISIT(tagged->wrapped);
  Py_VISIT(tagged->tag_object);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int tagged_clear(PyObject* self) {
  auto* tagged = reinterpret_cast<Tagged*>(self);
  Py_CLEAR(tagged->wrapped);
  Py_CLEAR(tagged->tag_object);
  return 0;
}

void tagged_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  tagged_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* tagged_getattro(PyObject* self, PyObject* name) {
  if (PyObject* own = PyObject_GenericGetAttr(self, name); own != nullptr) return own;
  if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) return nullptr;
  PyErr_Clear();
  return PyObject_GetAttr(reinterpret_cast<Tagged*>(self)->wrapped, name);
}

// On a class it binds like the function it stands for.
PyObject* tagged_descr_get(PyObject* self, PyObject* instance, PyObject* /*owner*/) {
  if (instance == nullptr || instance == Py_None) return Py_NewRef(self);
  return PyMethod_New(self, instance);
}

PyObject* tagged_reduce(PyObject* self, PyObject* /*unused*/) {
  auto* tagged = reinterpret_cast<Tagged*>(self);
  return Py_BuildValue("O(OO)", tagged_type, tagged->tag_object, tagged->wrapped);
}

PyObject* tagged_repr(PyObject* self) {
  return PyUnicode_FromFormat("<opacus_memprof.Tagged %R>",
                              reinterpret_cast<Tagged*>(self)->wrapped);
}

PyMemberDef tagged_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Tagged, vectorcall), READONLY, nullptr},
    {"__wrapped__", T_OBJECT, offsetof(Tagged, wrapped), READONLY, nullptr},
    {"tag", T_OBJECT, offsetof(Tagged, tag_object), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyObject* tagged_doc(PyObject* self, void* /*closure*/) {
  return PyObject_GetAttrString(reinterpret_cast<Tagged*>(self)->wrapped, "__doc__");
}

PyGetSetDef tagged_properties[] = {
    {"__doc__", tagged_doc, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef tagged_methods[] = {
    {"__reduce__", tagged_reduce, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot tagged_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(tagged_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(tagged_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(tagged_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(tagged_clear)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_getattro, reinterpret_cast<void*>(tagged_getattro)},
    {Py_tp_descr_get, reinterpret_cast<void*>(tagged_descr_get)},
    {Py_tp_repr, reinterpret_cast<void*>(tagged_repr)},
    {Py_tp_members, tagged_members},
    {Py_tp_getset, tagged_properties},
    {Py_tp_methods, tagged_methods},
    {0, nullptr},
};

PyType_Spec tagged_spec = {"opacus_memprof._C.Tagged", sizeof(Tagged), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
                           tagged_slots};

// ---- ScopedForward: a module's `forward` under the module's tag ----
//
// It stands in the module's __dict__ and so must not own the module: a cycle would keep the model's
// memory until a garbage collection. It holds the class' function and a weak reference instead.
// (A forward hook would cost several times as much: one hook sends every call of the module down
// torch's slow path.)

struct ScopedForward {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* function;   // unbound, from the class; or whatever stood in the __dict__, which is
                        // called as it is
  PyObject* reference;  // weak, to the module
  PyObject* weak_references;
  std::uint16_t module;
  char bind;
};

// A new reference; nullptr with ReferenceError set if the module is gone.
PyObject* module_of(const ScopedForward* scoped) {
  PyObject* module = PyObject_CallNoArgs(scoped->reference);
  if (module == nullptr || module != Py_None) return module;
  Py_DECREF(module);
  PyErr_SetString(PyExc_ReferenceError, "the module of this forward is gone");
  return nullptr;
}

PyObject* scoped_call(PyObject* self, PyObject* const* args, std::size_t flags, PyObject* names) {
  auto* scoped = reinterpret_cast<ScopedForward*>(self);
  const ModuleScope scope(scoped->module);
  if (scoped->bind == 0) return PyObject_Vectorcall(scoped->function, args, flags, names);
  PyObject* module = module_of(scoped);
  if (module == nullptr) return nullptr;
  const auto positional = static_cast<std::size_t>(PyVectorcall_NARGS(flags));
  const std::size_t named =
      names == nullptr ? 0 : static_cast<std::size_t>(PyTuple_GET_SIZE(names));
  std::vector<PyObject*> all;
  all.reserve(positional + named + 1);
  all.push_back(module);
  all.insert(all.end(), args, args + positional + named);
  PyObject* result = PyObject_Vectorcall(scoped->function, all.data(), positional + 1, names);
  Py_DECREF(module);
  return result;
}

PyObject* scoped_new(PyTypeObject* type, PyObject* args, PyObject* /*kwargs*/) {
  PyObject* function = nullptr;
  PyObject* reference = nullptr;
  unsigned int module = 0;
  int bind = 0;
  if (!PyArg_ParseTuple(args, "OOIp", &function, &reference, &module, &bind)) return nullptr;
  if (PyCallable_Check(function) == 0 || !PyWeakref_Check(reference) || module >= kKeep16) {
    PyErr_SetString(PyExc_TypeError,
                    "ScopedForward(function, weak reference, module id, bind) expected");
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  auto* scoped = reinterpret_cast<ScopedForward*>(self);
  scoped->vectorcall = scoped_call;
  scoped->function = Py_NewRef(function);
  scoped->reference = Py_NewRef(reference);
  scoped->module = static_cast<std::uint16_t>(module);
  scoped->bind = static_cast<char>(bind != 0);
  scoped->weak_references = nullptr;
  return self;
}

int scoped_traverse(PyObject* self, visitproc visit, void* arg) {
  auto* scoped = reinterpret_cast<ScopedForward*>(self);
  Py_VISIT(scoped->function);
  Py_VISIT(scoped->reference);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int scoped_clear(PyObject* self) {
  auto* scoped = reinterpret_cast<ScopedForward*>(self);
  Py_CLEAR(scoped->function);
  Py_CLEAR(scoped->reference);
  return 0;
}

void scoped_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  PyObject_ClearWeakRefs(self);
  scoped_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// What stands behind it, bound: for inspect.signature and whoever unwraps.
PyObject* scoped_wrapped(PyObject* self, void* /*closure*/) {
  auto* scoped = reinterpret_cast<ScopedForward*>(self);
  if (scoped->bind == 0) return Py_NewRef(scoped->function);
  PyObject* module = module_of(scoped);
  if (module == nullptr) return nullptr;
  PyObject* method = PyMethod_New(scoped->function, module);
  Py_DECREF(module);
  return method;
}

PyObject* forward_to_wrapped(PyObject* self, PyObject* name) {
  if (PyObject* own = PyObject_GenericGetAttr(self, name); own != nullptr) return own;
  if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) return nullptr;
  PyErr_Clear();
  PyObject* wrapped = scoped_wrapped(self, nullptr);
  if (wrapped == nullptr) return nullptr;
  PyObject* value = PyObject_GetAttr(wrapped, name);
  Py_DECREF(wrapped);
  return value;
}

// A pickle or deep copy of a model carries its plain forward: copies are not profiled.
PyObject* scoped_reduce(PyObject* self, PyObject* /*unused*/) {
  auto* scoped = reinterpret_cast<ScopedForward*>(self);
  PyObject* wrapped = scoped_wrapped(self, nullptr);
  if (wrapped == nullptr) return nullptr;
  PyObject* result = nullptr;
  if (scoped->bind != 0) {
    PyObject* builtins = PyEval_GetBuiltins();
    PyObject* getattr = PyDict_GetItemString(builtins, "getattr");
    result = Py_BuildValue("O(Os)", getattr, PyMethod_GET_SELF(wrapped), "forward");
  } else {
    result = PyObject_CallMethod(wrapped, "__reduce_ex__", "i", 4);
  }
  Py_DECREF(wrapped);
  return result;
}

PyMemberDef scoped_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(ScopedForward, vectorcall), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(ScopedForward, weak_references), READONLY, nullptr},
    {"bound_by_class", T_BOOL, offsetof(ScopedForward, bind), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef scoped_properties[] = {
    {"__wrapped__", scoped_wrapped, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef scoped_methods[] = {
    {"__reduce__", scoped_reduce, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot scoped_slots[] = {
    {Py_tp_doc, const_cast<char*>("A module's forward under the module's tag.")},
    {Py_tp_new, reinterpret_cast<void*>(scoped_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(scoped_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(scoped_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(scoped_clear)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_getattro, reinterpret_cast<void*>(forward_to_wrapped)},
    {Py_tp_members, scoped_members},
    {Py_tp_getset, scoped_properties},
    {Py_tp_methods, scoped_methods},
    {0, nullptr},
};

PyType_Spec scoped_spec = {"opacus_memprof._C.ScopedForward", sizeof(ScopedForward), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
                           scoped_slots};

// ---- GradientHook: a parameter's post-accumulate-grad hook ----

struct GradientHook {
  PyObject_HEAD vectorcallfunc vectorcall;
  std::uint16_t module;
};

PyObject* gradient_call(PyObject* self, PyObject* const* args, std::size_t flags,
                        PyObject* /*names*/) {
  if (PyVectorcall_NARGS(flags) > 0) {
    retag_gradient(args[0], static_cast<std::uint8_t>(Category::gradients),
                   reinterpret_cast<GradientHook*>(self)->module);
  }
  Py_RETURN_NONE;
}

PyObject* gradient_new(PyTypeObject* type, PyObject* args, PyObject* /*kwargs*/) {
  unsigned int module = 0;
  if (!PyArg_ParseTuple(args, "I", &module)) return nullptr;
  if (module >= kKeep16) {
    PyErr_SetString(PyExc_ValueError, "a module id is below 65535; take it from module_id()");
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  auto* hook = reinterpret_cast<GradientHook*>(self);
  hook->vectorcall = gradient_call;
  hook->module = static_cast<std::uint16_t>(module);
  return self;
}

void gradient_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMemberDef gradient_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(GradientHook, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot gradient_slots[] = {
    {Py_tp_doc, const_cast<char*>("A post-accumulate-grad hook: the gradient is one.")},
    {Py_tp_new, reinterpret_cast<void*>(gradient_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(gradient_dealloc)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, gradient_members},
    {0, nullptr},
};

PyType_Spec gradient_spec = {"opacus_memprof._C.GradientHook", sizeof(GradientHook), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, gradient_slots};

}  // namespace

PyObject* make_tagged(Tag tag, PyObject* tag_object, PyObject* function) {
  if (PyCallable_Check(function) == 0) {
    PyErr_Format(PyExc_TypeError, "a tag wraps a callable, not '%s'", Py_TYPE(function)->tp_name);
    return nullptr;
  }
  PyObject* self = tagged_type->tp_alloc(tagged_type, 0);
  if (self == nullptr) return nullptr;
  auto* tagged = reinterpret_cast<Tagged*>(self);
  tagged->vectorcall = tagged_call;
  tagged->wrapped = Py_NewRef(function);
  tagged->tag_object = Py_NewRef(tag_object);
  tagged->tag = tag;
  return self;
}

bool add_callables(PyObject* module) {
  tagged_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&tagged_spec));
  if (tagged_type == nullptr || PyModule_AddType(module, tagged_type) != 0) return false;
  for (PyType_Spec* spec : {&scoped_spec, &gradient_spec}) {
    PyObject* type = PyType_FromSpec(spec);
    if (type == nullptr) return false;
    const int added = PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type));
    Py_DECREF(type);
    if (added != 0) return false;
  }
  return true;
}

}  // namespace opacus_memprof
