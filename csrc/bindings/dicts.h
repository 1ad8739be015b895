// SPDX-License-Identifier: Apache-2.0
// C++ values as Python objects. A struct becomes a dict by one table, `fields(const Struct&)`: the
// names of its members, each with its getter.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <concepts>
#include <functional>
#include <ranges>
#include <string_view>
#include <tuple>

namespace opacus_memprof {

// `get` is a pointer to a member or to a function of the struct, or a function that takes it.
template <typename Get>
struct Field {
  const char* name;
  Get get;
};

// `converter(value)`, if there is such an overload, is preferred to the table.
template <typename Converter, typename Value>
pybind11::object to_python(const Value& value, const Converter& converter) {
  if constexpr (requires { converter(value); }) {
    return converter(value);
  } else if constexpr (requires { fields(value); }) {
    pybind11::dict result;
    const auto add = [&](const auto&... field) {
      ((result[field.name] = to_python(std::invoke(field.get, value), converter)), ...);
    };
    std::apply(add, fields(value));
    return result;
  } else if constexpr (std::ranges::range<Value> && !std::convertible_to<Value, std::string_view>) {
    pybind11::list result;
    for (const auto& item : value) result.append(to_python(item, converter));
    return result;
  } else {
    return pybind11::cast(value);
  }
}

}  // namespace opacus_memprof
