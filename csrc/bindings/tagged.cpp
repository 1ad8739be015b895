// SPDX-License-Identifier: Apache-2.0
// Tagged: runs a callable under a tag.
#include "adaptors/tensor.h"
#include "bindings/callable.h"
#include "bindings/callables.h"

namespace opacus_memprof {

namespace {

struct Tagged {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* wrapped;
  PyObject* tag_object;
  PyObject* module_of;  // the name of an argument whose block says the module; or None
  Tag tag;
};
using Slots = Collected<Tagged, &Tagged::wrapped, &Tagged::tag_object, &Tagged::module_of>;

PyTypeObject* tagged_type = nullptr;

// The argument that was passed by the name; nullptr if it was not.
PyObject* argument(PyObject* const* args, std::size_t flags, PyObject* names, PyObject* name) {
  const Py_ssize_t count = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (PyUnicode_Compare(PyTuple_GET_ITEM(names, i), name) == 0) {
      return args[PyVectorcall_NARGS(flags) + i];
    }
  }
  return nullptr;
}

[[gnu::hot]] PyObject* call(PyObject* self, PyObject* const* args, std::size_t flags,
                            PyObject* names) {
  const auto* tagged = as<Tagged>(self);
  if (tagged->module_of == Py_None) {
    return call_under(tagged->tag, tagged->wrapped, args, flags, names);
  }
  Tag tag = tagged->tag;
  if (PyObject* tensor = argument(args, flags, names, tagged->module_of); tensor != nullptr) {
    tag.module = module_of_tensor(tensor);
  }
  return call_under(tag, tagged->wrapped, args, flags, names);
}

PyObject* make(PyTypeObject* /*type*/, PyObject* args, PyObject* /*kwargs*/) {
  PyObject* tag = nullptr;
  PyObject* function = nullptr;
  PyObject* module_of = Py_None;
  if (!PyArg_ParseTuple(args, "OO|O", &tag, &function, &module_of)) return nullptr;
  return PyObject_CallFunctionObjArgs(tag, function, module_of, nullptr);  // it knows its own tag
}

PyObject* getattro(PyObject* self, PyObject* name) {
  if (PyObject* own = PyObject_GenericGetAttr(self, name); own != nullptr) return own;
  if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) return nullptr;
  PyErr_Clear();
  return PyObject_GetAttr(as<Tagged>(self)->wrapped, name);
}

// On a class it binds like the function it stands for.
PyObject* descr_get(PyObject* self, PyObject* instance, PyObject* /*owner*/) {
  if (instance == nullptr || instance == Py_None) return Py_NewRef(self);
  return PyMethod_New(self, instance);
}

PyObject* reduce(PyObject* self, PyObject* /*unused*/) {
  return Py_BuildValue("O(OOO)", tagged_type, as<Tagged>(self)->tag_object,
                       as<Tagged>(self)->wrapped, as<Tagged>(self)->module_of);
}

PyObject* repr(PyObject* self) {
  return PyUnicode_FromFormat("<opacus_memprof.Tagged %R>", as<Tagged>(self)->wrapped);
}

PyObject* doc(PyObject* self, void* /*closure*/) {
  return PyObject_GetAttrString(as<Tagged>(self)->wrapped, "__doc__");
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Tagged, vectorcall), READONLY, nullptr},
    {"__wrapped__", T_OBJECT, offsetof(Tagged, wrapped), READONLY, nullptr},
    {"tag", T_OBJECT, offsetof(Tagged, tag_object), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"__doc__", doc, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef methods[] = {
    {"__reduce__", reduce, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    slot(Py_tp_new, make),
    slot(Py_tp_dealloc, Slots::dealloc),
    slot(Py_tp_traverse, Slots::traverse),
    slot(Py_tp_clear, Slots::clear),
    slot(Py_tp_call, PyVectorcall_Call),
    slot(Py_tp_getattro, getattro),
    slot(Py_tp_descr_get, descr_get),
    slot(Py_tp_repr, repr),
    {Py_tp_members, members},
    {Py_tp_getset, properties},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec spec = {"opacus_memprof._C.Tagged", sizeof(Tagged), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};

}  // namespace

PyObject* make_tagged(Tag tag, PyObject* tag_object, PyObject* function, PyObject* module_of) {
  if (PyCallable_Check(function) == 0) {
    PyErr_Format(PyExc_TypeError, "a tag wraps a callable, not '%s'", Py_TYPE(function)->tp_name);
    return nullptr;
  }
  if (module_of != Py_None && PyUnicode_Check(module_of) == 0) {
    PyErr_SetString(PyExc_TypeError, "module_of is the name of an argument");
    return nullptr;
  }
  PyObject* self = tagged_type->tp_alloc(tagged_type, 0);
  if (self == nullptr) return nullptr;
  auto* tagged = as<Tagged>(self);
  tagged->vectorcall = call;
  tagged->wrapped = Py_NewRef(function);
  tagged->tag_object = Py_NewRef(tag_object);
  tagged->module_of = Py_NewRef(module_of);
  tagged->tag = tag;
  return self;
}

bool add_tagged(PyObject* module) { return add_type(module, spec, &tagged_type); }

}  // namespace opacus_memprof
