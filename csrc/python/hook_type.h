// SPDX-License-Identifier: Apache-2.0
// The Python type of a hook: a callable in a hot Python path. It is a CPython type, called by the
// vectorcall protocol, because a call through pybind11 or of a Python object would take several
// times as long as the hook. Python's garbage collector sees what a hook refers to.
//
// A hook is a struct with these members:
// - `static constexpr const char* kName`: the type's name in Python.
// - `static constexpr auto arguments()`: a tuple of pointers to the members that the constructor
//   sets, in the order of its arguments.
// - `PyObject* call(const Call& call)`: a new reference, or nullptr with a Python error set. It may
//   throw.
//
// These are optional:
// - `void prepare()`: called by the constructor when it has set the arguments. It may throw.
// - `pybind11::object wrapped_callable() const`: `__wrapped__`; by default the member `wrapped`.
// - `pybind11::object reduce(pybind11::handle protocol) const`: `__reduce_ex__`; by default
//   constructs the hook from its arguments.
// - `static constexpr bool kForwardsAttributes = true`: attributes that the type lacks are
//   looked up in `__wrapped__`.
// - `static std::vector<PyGetSetDef> properties()` and `static std::vector<PyType_Slot> slots()`:
//   additional members of the type.
#pragma once

#include <Python.h>
#include <pybind11/pybind11.h>
#include <structmember.h>

#include <concepts>
#include <cstddef>
#include <new>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/arguments.h"

namespace opacus_memprof {

// The arguments of a call by the vectorcall protocol.
struct Call {
  PyObject* const* args;
  std::size_t flags;
  PyObject* names;  // of the keyword arguments, which follow the positional ones; or nullptr

  [[nodiscard]] Py_ssize_t positional() const noexcept { return PyVectorcall_NARGS(flags); }
  [[nodiscard]] Py_ssize_t named() const noexcept {
    return names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  }
  [[nodiscard]] PyObject* pass_to(pybind11::handle function) const {
    return PyObject_Vectorcall(function.ptr(), args, flags, names);
  }
};

template <typename Hook>
class HookType {
 public:
  // Makes the type and adds it to the extension `module`. Throws pybind11::error_already_set.
  static void add(pybind11::module_& module) {
    static PyMemberDef members[] = {
        {"__vectorcalloffset__", T_PYSSIZET, offsetof(Instance, vectorcall), READONLY, nullptr},
        {"__weaklistoffset__", T_PYSSIZET, offsetof(Instance, weak_references), READONLY, nullptr},
        {nullptr, 0, 0, 0, nullptr},
    };
    static PyMethodDef methods[] = {{"__reduce_ex__", reduce, METH_O, nullptr},
                                    {nullptr, nullptr, 0, nullptr}};
    static std::vector<PyGetSetDef> properties = {property<wrapped_callable>("__wrapped__")};
    std::vector<PyType_Slot> slots = {
        slot(Py_tp_new, make),
        slot(Py_tp_dealloc, dealloc),
        slot(Py_tp_traverse, traverse),
        slot(Py_tp_clear, clear),
        slot(Py_tp_call, PyVectorcall_Call),
        {Py_tp_members, members},
        {Py_tp_methods, methods},
    };
    if constexpr (requires { Hook::properties(); }) {
      for (const PyGetSetDef& more : Hook::properties()) properties.push_back(more);
    }
    if constexpr (requires { Hook::slots(); }) {
      for (const PyType_Slot& more : Hook::slots()) slots.push_back(more);
    }
    if constexpr (requires { Hook::kForwardsAttributes; })
      slots.push_back(slot(Py_tp_getattro, getattro));
    properties.push_back({});
    slots.push_back({Py_tp_getset, properties.data()});
    slots.push_back({});
    static const std::string name = module.attr("__name__").cast<std::string>() + "." + Hook::kName;
    PyType_Spec spec = {name.c_str(), sizeof(Instance), 0,
                        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
                        slots.data()};
    type_ = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
    if (type_ == nullptr || PyModule_AddType(module.ptr(), type_) != 0)
      throw pybind11::error_already_set();
  }

  [[nodiscard]] static Hook& of(PyObject* self) noexcept {
    return reinterpret_cast<Instance*>(self)->hook;
  }

  // An entry for Hook::slots().
  template <typename Function>
  static PyType_Slot slot(int number, Function* function) noexcept {
    return {number, reinterpret_cast<void*>(function)};
  }

  // An entry for Hook::properties(), which reads `get(hook)`.
  template <auto get>
  static PyGetSetDef property(const char* name) noexcept {
    constexpr auto kGet = [](PyObject* self, void* /*closure*/) {
      return guarded([&] { return to_python(std::invoke(get, std::as_const(of(self)))); });
    };
    return {name, kGet, nullptr, nullptr, nullptr};
  }

 private:
  struct Instance {
    PyObject_HEAD vectorcallfunc vectorcall;
    PyObject* weak_references;
    Hook hook;
  };

  // Returns a new reference to the result of `function`; nullptr with a Python error set if it
  // throws.
  template <typename Function>
  static PyObject* guarded(Function function) {
    try {
      return function().release().ptr();
    } catch (...) {
      return raise_current_exception();
    }
  }

  [[gnu::hot]] static PyObject* vectorcall(PyObject* self, PyObject* const* args, std::size_t flags,
                                           PyObject* names) {
    try {
      return of(self).call({args, flags, names});
    } catch (...) {
      return raise_current_exception();
    }
  }

  static PyObject* make(PyTypeObject* type, PyObject* args, PyObject* /*kwargs*/) {
    return guarded([&] {
      Hook hook;
      const auto set = [&](auto... members) {
        return parse(&PyTuple_GET_ITEM(args, 0), PyTuple_GET_SIZE(args), hook.*members...);
      };
      if (!std::apply(set, Hook::arguments())) throw pybind11::error_already_set();
      if constexpr (requires { hook.prepare(); }) hook.prepare();
      PyObject* self = type->tp_alloc(type, 0);
      if (self == nullptr) throw pybind11::error_already_set();
      reinterpret_cast<Instance*>(self)->vectorcall = vectorcall;
      new (&of(self)) Hook(std::move(hook));
      return pybind11::reinterpret_steal<pybind11::object>(self);
    });
  }

  // Calls function(reference) for each member that holds an object.
  template <typename Function>
  static void for_each_reference(PyObject* self, Function function) {
    const auto each = [&](auto member) {
      auto& value = of(self).*member;
      if constexpr (std::derived_from<std::remove_reference_t<decltype(value)>, pybind11::object>)
        function(value);
    };
    std::apply([&](auto... members) { (each(members), ...); }, Hook::arguments());
  }

  static int traverse(PyObject* self, visitproc visit, void* arg) {
    int stop = visit(reinterpret_cast<PyObject*>(Py_TYPE(self)), arg);
    for_each_reference(self, [&](const pybind11::object& object) {
      if (stop == 0 && object) stop = visit(object.ptr(), arg);
    });
    return stop;
  }

  static int clear(PyObject* self) {
    for_each_reference(self, [](pybind11::object& object) { object.release().dec_ref(); });
    return 0;
  }

  static void dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    PyObject_ClearWeakRefs(self);
    of(self).~Hook();
    type->tp_free(self);
    Py_DECREF(type);
  }

  static pybind11::object wrapped_callable(const Hook& hook) {
    if constexpr (requires { hook.wrapped_callable(); }) {
      return hook.wrapped_callable();
    } else {
      return hook.wrapped;
    }
  }

  static PyObject* reduce(PyObject* self, PyObject* protocol) {
    return guarded([&]() -> pybind11::object {
      const Hook& hook = of(self);
      if constexpr (requires { hook.reduce(protocol); }) {
        return hook.reduce(protocol);
      } else {
        const auto all = [&](auto... members) {
          return pybind11::make_tuple(to_python(hook.*members)...);
        };
        return pybind11::make_tuple(pybind11::handle(reinterpret_cast<PyObject*>(type_)),
                                    std::apply(all, Hook::arguments()));
      }
    });
  }

  static PyObject* getattro(PyObject* self, PyObject* name) {
    if (PyObject* own = PyObject_GenericGetAttr(self, name); own != nullptr) return own;
    if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) return nullptr;
    PyErr_Clear();
    return guarded(
        [&] { return pybind11::object(wrapped_callable(of(self)).attr(pybind11::handle(name))); });
  }

  static inline PyTypeObject* type_ = nullptr;
};

// Pickles or deep-copies a hook as the hook that it wraps, so that copies of a model are plain
// Opacus models, which can be loaded where this package is missing.
inline pybind11::object reduce_to(const pybind11::object& wrapped, pybind11::handle protocol) {
  return wrapped.attr("__reduce_ex__")(protocol);
}

}  // namespace opacus_memprof
