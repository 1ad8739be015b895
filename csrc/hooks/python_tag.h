// SPDX-License-Identifier: Apache-2.0
// Makes, enters and pickles a Tag for Python, and calls Python under one.
#pragma once

#include <pybind11/pybind11.h>

#include "core/tag.h"
#include "core/tag_stack.h"
#include "python/hook_type.h"

namespace opacus_memprof {

// Each argument is an id, or None for a field that is inherited from the enclosing tag. Throws
// pybind11::error_already_set (ValueError) if the id does not exist.
Tag make_tag(pybind11::handle category, pybind11::handle phase, pybind11::handle module,
             pybind11::handle op);

// Pushes the tag of `self` onto the calling thread's stack; returns `self`, for `with`.
pybind11::object enter_tag(pybind11::object self);
// Pops the stack. Ignores the arguments that `with` passes.
void exit_tag(const Tag& tag, const pybind11::args& exception);

// Passes a hook's call on to `function` under a tag.
inline PyObject* pass_under(const Tag& tag, const Call& call, pybind11::handle function) {
  const TagScope scope(tag);
  return call.pass_to(function);
}

// Returns (category, phase, module, op) by name, because ids differ between processes; None for a
// field that is inherited from the enclosing tag.
pybind11::tuple tag_to_names(const Tag& tag);
// Returns the tag with these names, which are added if they are new.
Tag tag_from_names(const pybind11::tuple& tag_names);

}  // namespace opacus_memprof
