// SPDX-License-Identifier: Apache-2.0
#include "bindings/callables.h"

#include <structmember.h>

#include <cstddef>
#include <string>

#include "adaptors/autograd_position.h"
#include "core/names.h"
#include "core/tag_stack.h"

namespace opacus_memprof {

namespace {

// ---- Tagged: runs a callable under a tag ----

struct Tagged {
  PyObject_HEAD
  vectorcallfunc vectorcall;
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

PyMethodDef tagged_methods[] = {
    {"__reduce__", tagged_reduce, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot tagged_slots[] = {
    {Py_tp_doc, const_cast<char*>("A callable that runs the wrapped one under a tag.")},
    {Py_tp_new, reinterpret_cast<void*>(tagged_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(tagged_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(tagged_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(tagged_clear)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_getattro, reinterpret_cast<void*>(tagged_getattro)},
    {Py_tp_descr_get, reinterpret_cast<void*>(tagged_descr_get)},
    {Py_tp_repr, reinterpret_cast<void*>(tagged_repr)},
    {Py_tp_members, tagged_members},
    {Py_tp_methods, tagged_methods},
    {0, nullptr},
};

PyType_Spec tagged_spec = {
    "opacus_memprof._C.Tagged", sizeof(Tagged), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, tagged_slots};

// ---- EnterModule, ExitModule: forward (pre-)hooks ----

struct ModuleHook {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  std::uint16_t module;
};

PyObject* enter_call(PyObject* self, PyObject* const* /*args*/, std::size_t /*count*/,
                     PyObject* /*names*/) {
  enter_module(reinterpret_cast<ModuleHook*>(self)->module);
  Py_RETURN_NONE;
}

PyObject* exit_call(PyObject* self, PyObject* const* /*args*/, std::size_t /*count*/,
                    PyObject* /*names*/) {
  exit_module(reinterpret_cast<ModuleHook*>(self)->module);
  Py_RETURN_NONE;
}

PyObject* new_module_hook(PyTypeObject* type, PyObject* args, vectorcallfunc call) {
  PyObject* module = nullptr;  // an id; a name when it was pickled, since ids are the process' own
  if (!PyArg_ParseTuple(args, "O", &module)) return nullptr;
  unsigned long id = 0;
  if (PyUnicode_Check(module)) {
    const char* name = PyUnicode_AsUTF8(module);
    if (name == nullptr) return nullptr;
    id = names().intern(Names::Kind::module, name);
  } else {
    id = PyLong_AsUnsignedLong(module);
    if (PyErr_Occurred() != nullptr) return nullptr;
  }
  if (id >= kKeep16) {
    PyErr_SetString(PyExc_ValueError, "a module id is below 65535; take it from module_id()");
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  auto* hook = reinterpret_cast<ModuleHook*>(self);
  hook->vectorcall = call;
  hook->module = static_cast<std::uint16_t>(id);
  return self;
}

PyObject* enter_new(PyTypeObject* type, PyObject* args, PyObject* /*kwargs*/) {
  return new_module_hook(type, args, enter_call);
}

PyObject* exit_new(PyTypeObject* type, PyObject* args, PyObject* /*kwargs*/) {
  return new_module_hook(type, args, exit_call);
}

PyObject* module_hook_reduce(PyObject* self, PyObject* /*unused*/) {
  const auto all = names().list(Names::Kind::module);
  const std::string& name = all[reinterpret_cast<ModuleHook*>(self)->module];
  return Py_BuildValue("O(s)", Py_TYPE(self), name.c_str());
}

void module_hook_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMemberDef module_hook_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(ModuleHook, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyMethodDef module_hook_methods[] = {
    {"__reduce__", module_hook_reduce, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot enter_slots[] = {
    {Py_tp_doc, const_cast<char*>("A forward pre-hook that pushes a module's tag.")},
    {Py_tp_new, reinterpret_cast<void*>(enter_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(module_hook_dealloc)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, module_hook_members},
    {Py_tp_methods, module_hook_methods},
    {0, nullptr},
};

PyType_Slot exit_slots[] = {
    {Py_tp_doc, const_cast<char*>("The forward hook that undoes EnterModule.")},
    {Py_tp_new, reinterpret_cast<void*>(exit_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(module_hook_dealloc)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, module_hook_members},
    {Py_tp_methods, module_hook_methods},
    {0, nullptr},
};

constexpr unsigned int kHookFlags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
PyType_Spec enter_spec = {"opacus_memprof._C.EnterModule", sizeof(ModuleHook), 0, kHookFlags,
                          enter_slots};
PyType_Spec exit_spec = {"opacus_memprof._C.ExitModule", sizeof(ModuleHook), 0, kHookFlags,
                         exit_slots};

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
  auto* enter = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&enter_spec));
  auto* exit = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&exit_spec));
  return tagged_type != nullptr && enter != nullptr && exit != nullptr &&
         PyModule_AddType(module, tagged_type) == 0 && PyModule_AddType(module, enter) == 0 &&
         PyModule_AddType(module, exit) == 0;
}

}  // namespace opacus_memprof
