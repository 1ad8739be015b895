// SPDX-License-Identifier: Apache-2.0
// The modules of parameters, for hooks that get the parameter without its module.
//
// The key is the object's address: a reference would keep the parameter alive, and torch refuses to
// swap tensors that are weakly referenced. Called with the GIL held.
#pragma once

#include <Python.h>

#include <cstdint>

namespace opacus_memprof {

void set_owner(PyObject* parameter, std::uint16_t module);
void remove_owner(std::uintptr_t address) noexcept;
// 0 if no attached model has it.
std::uint16_t owner_of(PyObject* parameter) noexcept;

}  // namespace opacus_memprof
