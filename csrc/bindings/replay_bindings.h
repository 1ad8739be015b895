// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace opacus_memprof {

void bind_replay(pybind11::module_& m);
void bind_follower(pybind11::module_& m);

}  // namespace opacus_memprof
