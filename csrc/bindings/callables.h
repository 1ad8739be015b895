// SPDX-License-Identifier: Apache-2.0
// The callables that stand in hot Python paths (hooks), as CPython types of their own: a call
// through pybind11 would cost several times what the tag itself costs.
#pragma once

#include <Python.h>

#include "core/tag.h"

namespace opacus_memprof {

// Adds Tagged, ScopedForward and GradientHook to the module. Returns false with a Python error set.
bool add_callables(PyObject* module);

// A new Tagged; steals nothing. nullptr with a Python error set if `function` is not callable.
PyObject* make_tagged(Tag tag, PyObject* tag_object, PyObject* function);

}  // namespace opacus_memprof
