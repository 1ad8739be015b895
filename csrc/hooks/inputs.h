// SPDX-License-Identifier: Apache-2.0
// Gives the category `inputs` to the tensors of a step, if no hook has given them another category.
// opacus_memprof/hooks/inputs.py says when.
#pragma once

#include <Python.h>

#include <cstdint>
#include <utility>

namespace opacus_memprof {

// Retags the tensors of a batch, except tensors that require a gradient. Returns the first
// dimension of the first one that has dimensions, -1 if none has, and the elements of all.
std::pair<std::int64_t, std::int64_t> tag_inputs(PyObject* batch);

// Retags the target of a loss, unless it requires a gradient, or was made in forward and autograd
// holds it too. Skips objects that are not plain tensors.
void tag_target(PyObject* target);

}  // namespace opacus_memprof
