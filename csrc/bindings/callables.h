// SPDX-License-Identifier: Apache-2.0
// The callables that stand in hot Python paths (callable.h), for the module's definition.
#pragma once

#include <Python.h>

#include "core/tag.h"

namespace opacus_memprof {

// Adds their types to the module. Returns false with a Python error set.
bool add_callables(PyObject* module);

// Samplers let every layer be observed once more.
void look_again() noexcept;

// A new Tagged; steals nothing. nullptr with a Python error set if `function` is not callable, or
// `module_of` neither a name nor None.
PyObject* make_tagged(Tag tag, PyObject* tag_object, PyObject* function, PyObject* module_of);

}  // namespace opacus_memprof
