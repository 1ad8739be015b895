// SPDX-License-Identifier: Apache-2.0
// What the callables of this folder share. They are CPython types of their own, called by the
// vectorcall protocol: one stands in each of Opacus' hot Python paths, where a call through
// pybind11 or of a Python object would cost several times what it does.
#pragma once

#include <Python.h>
#include <structmember.h>

#include <cstddef>
#include <cstdint>

#include "core/tag_stack.h"

namespace opacus_memprof {

template <typename T>
T* as(PyObject* self) noexcept {
  return reinterpret_cast<T*>(self);
}

[[gnu::hot]] inline PyObject* call_under(const Tag& tag, PyObject* function, PyObject* const* args,
                                         std::size_t flags, PyObject* names) {
  const TagScope scope(tag);
  return PyObject_Vectorcall(function, args, flags, names);
}

// The slots of a type whose instances hold these references, and so take part in garbage
// collection.
template <typename T, PyObject* T::*... references>
struct Collected {
  static int traverse(PyObject* self, visitproc visit, void* arg) {
    int stop = 0;
    const auto go = [&](PyObject* object) {
      stop = object == nullptr ? 0 : visit(object, arg);
      return stop == 0;
    };
    static_cast<void>((go(as<T>(self)->*references) && ...) &&
                      go(reinterpret_cast<PyObject*>(Py_TYPE(self))));
    return stop;
  }

  static int clear(PyObject* self) {
    const auto drop = [](PyObject*& object) { Py_CLEAR(object); };
    (drop(as<T>(self)->*references), ...);
    return 0;
  }

  static void dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if constexpr (requires(T * object) { object->weak_references; }) PyObject_ClearWeakRefs(self);
    clear(self);
    type->tp_free(self);
    Py_DECREF(type);
  }
};

template <typename Function>
PyType_Slot slot(int number, Function* function) noexcept {
  return {number, reinterpret_cast<void*>(function)};
}

// Python's word for the C++ exception in flight, for a call that Python made: always nullptr.
PyObject* raise_current_exception() noexcept;

// Converters for PyArg_ParseTuple's O&, into a Tag, a module's id, a category's id, a callable.
int to_tag(PyObject* object, void* tag);
int to_module(PyObject* object, void* module);
int to_category(PyObject* object, void* category);
int to_callable(PyObject* object, void* callable);

// __reduce_ex__ of a hook that stands for another one, `__wrapped__`: a pickle or deep copy of it
// is the other one, so that copies of a model are plain Opacus models, which load where this
// package is missing.
PyObject* reduce_to_wrapped(PyObject* self, PyObject* protocol);

// The sampler that a capture_backprops_hook on this thread has called, if one has, returns.
void sampled() noexcept;

// Each makes one type and adds it to the module; false with a Python error set.
bool add_type(PyObject* module, PyType_Spec& spec, PyTypeObject** made = nullptr);
bool add_tagged(PyObject* module);
bool add_scoped_forward(PyObject* module);
bool add_capture_activations(PyObject* module);
bool add_capture_backprops(PyObject* module);
bool add_sampler(PyObject* module);
bool add_parameter_function(PyObject* module);
bool add_step_functions(PyObject* module);

}  // namespace opacus_memprof
