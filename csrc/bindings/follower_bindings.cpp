// SPDX-License-Identifier: Apache-2.0
// Follower: core/follower.h with ids instead of names, as replay() has them.
#include <pybind11/stl.h>

#include <string>

#include "bindings/replay_bindings.h"
#include "core/follower.h"

namespace opacus_memprof {
namespace {

namespace py = pybind11;
using namespace py::literals;

py::dict state(const Follower& follower) {
  py::list devices;
  for (const auto& [id, device] : follower.devices()) {
    devices.append(py::dict("id"_a = id, "bytes"_a = device.bytes,
                            "peak_bytes"_a = device.peak_bytes, "peak_step"_a = device.peak_step,
                            "step_ends"_a = device.step_ends, "categories"_a = device.categories,
                            "modules"_a = device.modules));
  }
  const FileHeader& header = follower.header();
  return py::dict("category_names"_a = kCategoryNames, "phase_names"_a = kPhaseNames,
                  "pid"_a = header.pid, "closed"_a = header.closed != 0,
                  "dropped"_a = header.dropped, "start_unix_ns"_a = header.start_unix_ns,
                  "last_unix_ns"_a = header.last_unix_ns, "events"_a = follower.reading().events,
                  "step"_a = follower.step(), "logical_step"_a = follower.logical_step(),
                  "phase"_a = follower.phase(), "out_of_memory"_a = follower.out_of_memory(),
                  "devices"_a = devices);
}

}  // namespace

void bind_follower(py::module_& m) {
  py::class_<Follower>(m, "Follower", "Reads on in directory/events.bin while it is written.")
      .def(py::init([](const std::string& directory) {
             return std::make_unique<Follower>(directory + "/events.bin");
           }),
           "directory"_a, "Raises RuntimeError where there is no readable event file.")
      .def(
          "advance",
          [](Follower& follower) {
            {
              const py::gil_scoped_release release;
              follower.advance();
            }
            return state(follower);
          },
          "Reads what was written since; what is live now, with ids as replay() has them.");
}

}  // namespace opacus_memprof
