// SPDX-License-Identifier: Apache-2.0
// The arguments of the profiler's hooks and functions, in addition to those of python/arguments.h:
//   Tag: a Tag
//   std::uint8_t: the id of a category, as in Tag
//   CategorySet: a sequence of ids of categories
//   std::uint16_t: the id of a module, as in Tag
//   ModuleOrKeep: likewise, or None, and it may be omitted
//   OpId, Phase: the id of an op, of a phase
//   ObjectId: a result of id()
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>

#include "core/tag.h"
#include "python/arguments.h"

namespace opacus_memprof {

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

template <>
bool from_python(PyObject* object, Tag& tag);
template <>
bool from_python(PyObject* object, std::uint8_t& category);
template <>
bool from_python(PyObject* object, std::uint16_t& module);
template <>
bool from_python(PyObject* object, ModuleOrKeep& module);
template <>
bool from_python(PyObject* object, CategorySet& categories);
template <>
bool from_python(PyObject* object, OpId& op);
template <>
bool from_python(PyObject* object, Phase& phase);
template <>
bool from_python(PyObject* object, ObjectId& id);

template <>
inline constexpr bool kMayBeOmitted<ModuleOrKeep> = true;

inline pybind11::object to_python(const Tag& tag) { return pybind11::cast(tag); }

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
