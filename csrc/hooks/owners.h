// SPDX-License-Identifier: Apache-2.0
// Which module a parameter belongs to, for those who meet the parameter without its module.
//
// By the object's address: holding a parameter would keep it alive, and torch refuses to swap
// tensors that are weakly referenced. Called with the GIL held.
#pragma once

#include <Python.h>

#include <cstdint>

namespace opacus_memprof {

void set_owner(PyObject* parameter, std::uint16_t module);
void forget_owner(std::uintptr_t address) noexcept;
// 0 if no attached model has it.
std::uint16_t owner_of(PyObject* parameter) noexcept;

}  // namespace opacus_memprof
