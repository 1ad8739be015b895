// SPDX-License-Identifier: Apache-2.0
// Makes, enters and pickles a Tag for Python.
#pragma once

#include <pybind11/pybind11.h>

#include "core/tag.h"

namespace opacus_memprof {

// Each argument is an id, or None for a field that is inherited from the enclosing tag. Throws
// pybind11::error_already_set (ValueError) if the id does not exist.
Tag make_tag(pybind11::handle category, pybind11::handle phase, pybind11::handle module,
             pybind11::handle op);

// Pushes the tag of `self` onto the calling thread's stack; returns `self`, for `with`.
pybind11::object enter_tag(pybind11::object self);
// Pops the stack. Ignores the arguments that `with` passes.
void exit_tag(const Tag& tag, const pybind11::args& exception);

// Returns (category, phase, module, op) by name, because ids differ between processes; None for a
// field that is inherited from the enclosing tag.
pybind11::tuple tag_to_names(const Tag& tag);
// Returns the tag with these names, which are added if they are new.
Tag tag_from_names(const pybind11::tuple& tag_names);

}  // namespace opacus_memprof
