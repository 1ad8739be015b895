// SPDX-License-Identifier: Apache-2.0
// Converts Python's arguments to C++ values, for functions that are called too often for pybind11.
// Between two calls a training step runs enough code to evict pybind11's call path from the caches,
// which then takes several times as long as the function.
//
// The type of a value defines the accepted arguments:
//   pybind11::function, str, weakref: an object of that kind; OrNone<...>: or None
//   pybind11::handle, object: any object
//   Tag: a Tag
//   std::uint8_t: the id of a category, as in Tag
//   CategorySet: a sequence of ids of categories
//   std::uint16_t: the id of a module, as in Tag
//   ModuleOrKeep: likewise, or None, and it may be omitted
//   OpId, Phase: the id of an op, of a phase
//   ObjectId: a result of id()
//   bool: any object, for its truth value
#pragma once

#include <pybind11/pybind11.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>

#include "core/tag.h"

namespace opacus_memprof {

template <std::derived_from<pybind11::object> Object>
struct OrNone : pybind11::object {};

struct ModuleOrKeep {
  std::uint16_t id = kKeep16;
};

struct OpId {
  std::uint16_t id = kKeep16;
};

struct CategorySet {
  std::uint64_t bits = 0;  // bit i is the category with id i
};

// The address of a Python object, which need not exist any more.
struct ObjectId {
  std::uintptr_t address = 0;
};

// Sets Python's error for the C++ exception in flight; always returns nullptr. Neither this
// function nor its callers are noexcept: when the process exits, Python ends daemon threads by
// unwinding their stacks, which must be possible.
PyObject* raise_current_exception();

// Sets the error "a str is expected, not 'int'"; always returns false.
bool refuse(PyObject* object, const char* expected);

// Each converts one argument; false with a Python error set.
bool from_python(PyObject* object, Tag& tag);
bool from_python(PyObject* object, std::uint8_t& category);
bool from_python(PyObject* object, std::uint16_t& module);
bool from_python(PyObject* object, ModuleOrKeep& module);
bool from_python(PyObject* object, CategorySet& categories);
bool from_python(PyObject* object, OpId& op);
bool from_python(PyObject* object, Phase& phase);
bool from_python(PyObject* object, ObjectId& id);
bool from_python(PyObject* object, bool& value);

inline bool from_python(PyObject* object, pybind11::handle& value) {
  value = object;
  return true;
}

template <std::derived_from<pybind11::object> Object>
bool from_python(PyObject* object, Object& value) {
  if (!pybind11::isinstance<Object>(object)) {
    constexpr bool kFunction = std::same_as<Object, pybind11::function>;
    constexpr bool kName = std::same_as<Object, pybind11::str>;
    return refuse(object, kFunction ? "a callable" : kName ? "a str" : "a weak reference");
  }
  value = pybind11::reinterpret_borrow<Object>(object);
  return true;
}

template <typename Object>
bool from_python(PyObject* object, OrNone<Object>& value) {
  Object checked;
  if (object != Py_None && !from_python(object, checked)) return false;
  static_cast<pybind11::object&>(value) = pybind11::reinterpret_borrow<pybind11::object>(object);
  return true;
}

inline pybind11::object to_python(const pybind11::object& value) { return value; }
inline pybind11::object to_python(const Tag& tag) { return pybind11::cast(tag); }
template <std::integral Number>
pybind11::object to_python(Number number) {
  return pybind11::cast(number);
}

// Converts all arguments of a call; false with a Python error set.
template <typename... Values>
bool parse(PyObject* const* args, Py_ssize_t count, Values&... values) {
  constexpr Py_ssize_t kMaxArguments = sizeof...(Values);
  constexpr Py_ssize_t kMinArguments = (0 + ... + (std::same_as<Values, ModuleOrKeep> ? 0 : 1));
  if (count < kMinArguments || count > kMaxArguments) {
    PyErr_Format(PyExc_TypeError, "%zd arguments are expected, not %zd", kMinArguments, count);
    return false;
  }
  Py_ssize_t at = 0;
  return ((at == count || from_python(args[at++], values)) && ...);
}

// Calls a function with Python's arguments, each converted to what the function takes.
template <typename Result, typename... Values>
PyObject* call_with(Result (*function)(Values...), PyObject* const* args, Py_ssize_t count) {
  try {
    std::tuple<std::remove_cvref_t<Values>...> values;
    if (!std::apply([&](auto&... each) { return parse(args, count, each...); }, values))
      return nullptr;
    if constexpr (std::is_void_v<Result>) {
      std::apply(function, values);
      Py_RETURN_NONE;
    } else {
      return to_python(std::apply(function, values)).release().ptr();
    }
  } catch (...) {
    return raise_current_exception();
  }
}

template <typename Result, typename... Values>
constexpr std::size_t arity(Result (* /*function*/)(Values...)) {
  return sizeof...(Values);
}

// The entry of a module's function table for `function`.
template <auto function>
PyMethodDef method(const char* name) noexcept {
  if constexpr (arity(function) == 1) {  // CPython's fastest way to call
    return {
        name,
        [](PyObject* /*module*/, PyObject* argument) { return call_with(function, &argument, 1); },
        METH_O, nullptr};
  } else {
    PyObject* (*call)(PyObject*, PyObject* const*, Py_ssize_t) =
        [](PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
          return call_with(function, args, count);
        };
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL,
            nullptr};
  }
}

}  // namespace opacus_memprof
