// SPDX-License-Identifier: Apache-2.0
// The extension that reads profiles. It is built without torch and loads without it; _core.pyi says
// what each definition means.
#include <pybind11/pybind11.h>

#include "bindings/replay_bindings.h"

PYBIND11_MODULE(_core, m) {
  opacus_memprof::bind_replay(m);
  opacus_memprof::bind_follower(m);
}
