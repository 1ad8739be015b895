// SPDX-License-Identifier: Apache-2.0
// How Python makes, enters and pickles a Tag.
#pragma once

#include <pybind11/pybind11.h>

#include "core/tag.h"

namespace opacus_memprof {

// Each argument is an id, or None for a field that is taken from the enclosing tag. Throws
// pybind11::error_already_set (ValueError) if the id was never given out.
Tag make_tag(pybind11::handle category, pybind11::handle phase, pybind11::handle module,
             pybind11::handle op);

// Pushes the tag of `self` onto the calling thread's stack; returns `self`, for `with`.
pybind11::object enter_tag(pybind11::object self);
// Pops the stack. Takes and ignores what `with` passes.
void exit_tag(const Tag& tag, const pybind11::args& exception);

// (category, phase, module, op) by name, because ids differ from process to process; None for a
// field that is taken from the enclosing tag.
pybind11::tuple tag_to_names(const Tag& tag);
// The tag with these names, which become known here if they are new.
Tag tag_from_names(const pybind11::tuple& tag_names);

}  // namespace opacus_memprof
