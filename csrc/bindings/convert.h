// SPDX-License-Identifier: Apache-2.0
// The recorder's structures as the Python objects that _C.pyi describes.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "core/recorder.h"

namespace opacus_memprof {

pybind11::dict to_python(const Recorder::State& state);
pybind11::dict to_python(const Recorder::Snapshot& snapshot, const std::string& name);
pybind11::dict to_python(const std::vector<Recorder::DevicePeak>& peaks);
pybind11::list to_python(const std::vector<Block>& blocks);
pybind11::list to_python(const std::vector<Failure>& failures);

}  // namespace opacus_memprof
