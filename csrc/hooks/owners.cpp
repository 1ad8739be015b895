// SPDX-License-Identifier: Apache-2.0
#include "hooks/owners.h"

#include <unordered_map>

namespace opacus_memprof {

namespace {

std::unordered_map<std::uintptr_t, std::uint16_t>& owners() {
  static auto* const instance = new std::unordered_map<std::uintptr_t, std::uint16_t>;
  return *instance;
}

std::uintptr_t key_of(const PyObject* object) noexcept {
  return reinterpret_cast<std::uintptr_t>(object);
}

}  // namespace

void set_owner(PyObject* parameter, std::uint16_t module) { owners()[key_of(parameter)] = module; }

void remove_owner(std::uintptr_t address) noexcept { owners().erase(address); }

std::uint16_t owner_of(PyObject* parameter) noexcept {
  const auto found = owners().find(key_of(parameter));
  return found == owners().end() ? std::uint16_t{0} : found->second;
}

}  // namespace opacus_memprof
