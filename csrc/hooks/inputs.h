// SPDX-License-Identifier: Apache-2.0
// What a step is given becomes `inputs`, unless somebody has claimed it: hooks/inputs.py.
#pragma once

#include <Python.h>

#include <cstdint>
#include <utility>

namespace opacus_memprof {

// The tensors of a batch that nobody has computed from parameters. Returns the first dimension of
// the first one that has dimensions, -1 where none has, and the elements of all.
std::pair<std::int64_t, std::int64_t> tag_inputs(PyObject* batch);

// What a loss compares with, unless it was computed from parameters, or made in forward and held by
// autograd too. Whatever is no plain tensor is passed over.
void tag_target(PyObject* target);

}  // namespace opacus_memprof
