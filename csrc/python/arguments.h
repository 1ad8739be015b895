// SPDX-License-Identifier: Apache-2.0
// Converts Python's arguments to C++ values, for calls that are too frequent for pybind11. Between
// two calls a training step runs enough code to evict pybind11's call path from the caches, which
// then takes several times as long as the function.
//
// The type of a value defines the accepted arguments. Here:
//   pybind11::function, str, weakref: an object of that kind; OrNone<...>: or None
//   pybind11::handle, object: any object
//   bool: any object, for its truth value
// Others specialize from_python for types of their own.
#pragma once

#include <pybind11/pybind11.h>

#include <concepts>

namespace opacus_memprof {

template <std::derived_from<pybind11::object> Object>
struct OrNone : pybind11::object {};

// Sets Python's error for the C++ exception in flight; always returns nullptr. Neither this
// function nor its callers are noexcept: when the process exits, Python ends daemon threads by
// unwinding their stacks, which must be possible.
PyObject* raise_current_exception();

// Sets the error "a str is expected, not 'int'"; always returns false.
bool refuse(PyObject* object, const char* expected);

// Converts one argument; returns false with a Python error set.
template <typename Value>
bool from_python(PyObject* object, Value& value) = delete;
template <>
bool from_python(PyObject* object, bool& value);
template <>
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
template <std::integral Number>
pybind11::object to_python(Number number) {
  return pybind11::cast(number);
}

// Whether a call may leave out an argument of this type, which then has its default.
template <typename Value>
inline constexpr bool kMayBeOmitted = false;

// Converts all arguments of a call; returns false with a Python error set.
template <typename... Values>
bool parse(PyObject* const* args, Py_ssize_t count, Values&... values) {
  constexpr Py_ssize_t kMaxArguments = sizeof...(Values);
  constexpr Py_ssize_t kMinArguments = (0 + ... + (kMayBeOmitted<Values> ? 0 : 1));
  if (count < kMinArguments || count > kMaxArguments) {
    PyErr_Format(PyExc_TypeError, "%zd arguments are expected, not %zd", kMinArguments, count);
    return false;
  }
  Py_ssize_t at = 0;
  return ((at == count || from_python(args[at++], values)) && ...);
}

}  // namespace opacus_memprof
