// SPDX-License-Identifier: Apache-2.0
// The Python face of the virtual GPU's values; definitions only.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "virtual_values/counts.h"
#include "virtual_values/graphs.h"
#include "virtual_values/intercept.h"
#include "virtual_values/outside.h"

namespace values = opacus_memprof::virtual_values;

PYBIND11_MODULE(_virtual, module) {
  module.def("install", &values::install, pybind11::call_guard<pybind11::gil_scoped_release>());
  module.def("enable_thread", &values::enable_thread);
  module.def("set_libraries", &values::set_libraries);
  module.def("unknown_reads", &values::unknown_reads);
  module.def("assumed_shapes", &values::assumed_shapes);
  module.def("failures", &values::failures);
  module.def("count_rank_read", [](const std::string& operation) {
    values::count_unknown_read(operation, values::State::alike);
  });
  module.def("set_noted", &values::set_noted);
  module.def("note_written_by_kernel", &values::note_written_by_kernel);
}
