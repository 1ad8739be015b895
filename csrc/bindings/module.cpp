// SPDX-License-Identifier: Apache-2.0
// Definitions only: the functions behind each Python name. _C.pyi documents each.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <system_error>

#include "allocators/profiled_allocator.h"
#include "allocators/program_line.h"
#include "bindings/bindings.h"
#include "core/names.h"
#include "core/profile_directory.h"
#include "core/recorder.h"
#include "hooks/hooks.h"
#include "hooks/python_tag.h"

namespace py = pybind11;

namespace opacus_memprof {

namespace {

using Kind = Names::Kind;

void bind_names(py::module_& m) {
  m.def("category_id",
        [](const std::string& name) { return names().intern_or_throw(Kind::category, name); });
  m.def("module_id", [](const std::string& name) { return names().intern(Kind::module, name); });
  m.def("op_id", [](const std::string& name) { return names().intern(Kind::op, name); });
  m.def("phase_id", &phase_id);
  m.def("names", &all_names);
  m.def("set_program", &set_program, py::arg("libraries"), py::arg("folders"));
}

void bind_hooks(py::module_& m) {
  add_tagged(m);
  add_scoped_forward(m);
  add_capture_activations(m);
  add_capture_backprops(m);
  add_sampler(m);
  add_parameter_function(m);
  add_functions(m);
}

void bind_tags(py::module_& m) {
  py::class_<Tag>(m, "Tag")
      .def(py::init(&make_tag), py::arg("category") = py::none(), py::arg("phase") = py::none(),
           py::arg("module") = py::none(), py::arg("op") = py::none())
      .def("__enter__", &enter_tag)
      .def("__exit__", &exit_tag)
      .def(
          "__call__",
          [tagged = m.attr("Tagged")](const py::object& self, const py::object& function,
                                      const py::object& module_of) {
            return tagged(self, function, module_of);
          },
          py::arg("function"), py::arg("module_of") = py::none())
      .def(py::pickle(&tag_to_names, &tag_from_names));
}

void bind_events(py::module_& m) {
  m.def("start_events", &start_profile_directory, py::arg("directory"), py::arg("max_events"),
        py::arg("info_json"));
  m.def("stop_events", [] {
    std::unique_ptr<ProfileDirectory> ended = detach_profile_directory();
    const py::gil_scoped_release release;  // the destructor joins the event file's thread
    ended.reset();
  });
  m.def("write_meta", [] { current_profile_directory().write_meta(); });
  m.def("step",
        [] { return py::make_tuple(recorder().physical_step(), recorder().logical_step()); });
}

void bind_allocators(py::module_& m) {
  m.def("cpu_install", [] { cpu_allocator().install(); });
  m.def("cpu_uninstall", [] { cpu_allocator().uninstall(); });
  m.def("cpu_installed", [] { return cpu_allocator().installed(); });
  m.def("cpu_reported_bytes", &cpu_reported_bytes);
  m.def("cpu_limit", &cpu_limit, py::arg("bytes"));
  m.def("cuda_install", [] { cuda_allocator().install(); });
  m.def("cuda_uninstall", [] { cuda_allocator().uninstall(); });
  m.def("cuda_installed", [] { return cuda_allocator().installed(); });
  m.def("cuda_current_name", &cuda_current_name);
  m.def("cuda_refresh", &cuda_refresh, py::arg("device"));
}

}  // namespace

}  // namespace opacus_memprof

PYBIND11_MODULE(_C, m) {
  using namespace opacus_memprof;
  // A file that cannot be written raises Python's OSError, with its errno.
  py::register_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const std::system_error& error) {
      PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), error.what()).ptr());
    }
  });
  bind_names(m);
  bind_hooks(m);
  bind_tags(m);
  bind_counters(m);
  bind_events(m);
  bind_allocators(m);
  bind_cuda_object(m);
}
