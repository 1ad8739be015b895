// SPDX-License-Identifier: Apache-2.0
// Definitions only; _C.pyi says what each one means.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>

#include "allocators/profiled_allocator.h"
#include "allocators/tensor.h"
#include "bindings/bindings.h"
#include "core/names.h"
#include "core/profile_directory.h"
#include "core/recorder.h"
#include "core/tag_stack.h"
#include "hooks/gradient_hook.h"
#include "hooks/hooks.h"
#include "hooks/owners.h"
#include "hooks/tensors_in.h"

namespace py = pybind11;

namespace opacus_memprof {

namespace {

using Kind = Names::Kind;

std::uint8_t phase_id(const std::string& name) {
  for (std::size_t id = 0; id < kPhases; ++id) {
    if (kPhaseNames[id] == name) return static_cast<std::uint8_t>(id);
  }
  throw std::invalid_argument("unknown phase '" + name + "'");
}

template <typename Id>
Id checked(std::optional<int> value, std::size_t limit, Id keep, const char* what) {
  if (!value) return keep;
  if (*value < 0 || static_cast<std::size_t>(*value) >= limit) {
    throw std::invalid_argument(std::string(what) + " id out of range: " + std::to_string(*value));
  }
  return static_cast<Id>(*value);
}

Tag make_tag(std::optional<int> category, std::optional<int> phase, std::optional<int> module,
             std::optional<int> op) {
  return {.category = checked(category, names().size(Kind::category), kKeep8, "category"),
          .phase = checked(phase, kPhases, kKeep8, "phase"),
          .module = checked(module, names().size(Kind::module), kKeep16, "module"),
          .op = checked(op, names().size(Kind::op), kKeep16, "op")};
}

std::uint8_t category(int id) {
  return checked(id, names().size(Kind::category), kKeep8, "category");
}

std::uint16_t module_or_keep(std::optional<int> id) {
  return checked(id, names().size(Kind::module), kKeep16, "module");
}

// Ids are the process' own, so a pickled tag carries names.
py::object name_or_none(Kind kind, std::uint16_t id, std::uint16_t keep) {
  return id == keep ? py::object(py::none()) : py::object(py::str(names().list(kind)[id]));
}

py::tuple tag_to_pickle(const Tag& tag) {
  return py::make_tuple(
      name_or_none(Kind::category, tag.category, kKeep8),
      tag.phase == kKeep8 ? py::object(py::none()) : py::object(py::str(kPhaseNames[tag.phase])),
      name_or_none(Kind::module, tag.module, kKeep16), name_or_none(Kind::op, tag.op, kKeep16));
}

Tag tag_from_pickle(const py::tuple& state) {
  Tag tag;
  if (!state[0].is_none()) {
    tag.category =
        static_cast<std::uint8_t>(names().intern(Kind::category, state[0].cast<std::string>()));
  }
  if (!state[1].is_none()) tag.phase = phase_id(state[1].cast<std::string>());
  if (!state[2].is_none()) tag.module = names().intern(Kind::module, state[2].cast<std::string>());
  if (!state[3].is_none()) tag.op = names().intern(Kind::op, state[3].cast<std::string>());
  return tag;
}

ProfileDirectory& profile_directory() {
  if (current_profile_directory() == nullptr) {
    throw std::runtime_error("no events are being written; call start_events first");
  }
  return *current_profile_directory();
}

void bind_names(py::module_& m) {
  m.def("category_id",
        [](const std::string& name) { return names().intern_or_throw(Kind::category, name); });
  m.def("module_id", [](const std::string& name) { return names().intern(Kind::module, name); });
  m.def("set_component", [](int module, const std::string& component) {
    names().set_component(module_or_keep(module), component);
  });
  m.def("op_id", [](const std::string& name) { return names().intern(Kind::op, name); });
  m.def("phase_id", &phase_id);
  m.def("names", &all_names);
}

void bind_hooks(py::module_& m) {
  add_tagged(m);
  add_scoped_forward(m);
  add_capture_activations(m);
  add_capture_backprops(m);
  add_sampler(m);
  add_parameter_function(m);
  add_step_functions(m);
  m.def("look_again", &look_again);
}

void bind_tags(py::module_& m) {
  py::class_<Tag>(m, "Tag")
      .def(py::init(&make_tag), py::arg("category") = py::none(), py::arg("phase") = py::none(),
           py::arg("module") = py::none(), py::arg("op") = py::none())
      .def("__enter__",
           [](const py::object& self) {
             this_thread().push(self.cast<const Tag&>());
             return self;
           })
      .def("__exit__", [](const Tag&, const py::args&) { this_thread().pop(); })
      .def(
          "__call__",
          [tagged = m.attr("Tagged")](const py::object& self, const py::object& function,
                                      const py::object& module_of) {
            return tagged(self, function, module_of);
          },
          py::arg("function"), py::arg("module_of") = py::none())
      .def(py::pickle(&tag_to_pickle, &tag_from_pickle));
  m.def("step",
        [] { return py::make_tuple(recorder().physical_step(), recorder().logical_step()); });
}

void bind_blocks(py::module_& m) {
  m.def(
      "retag_if",
      [](const py::object& tensors, const std::vector<int>& expected, int id,
         std::optional<int> module) {
        std::uint64_t set = 0;
        for (const int one : expected) set |= std::uint64_t{1} << category(one);
        return retag_tensors(tensors, category(id), module_or_keep(module), set);
      },
      py::arg("tensors"), py::arg("expected"), py::arg("category"), py::arg("module") = py::none());
  m.def("capture", [](int module, const py::object& tensors) {
    capture_tensors(module_or_keep(module), TensorsIn(tensors).all());
  });
  m.def("release", &release_captures);
  m.def("settle", &settle_captures);
  m.def("tensors_in", [](const py::object& value) {
    py::list result;
    for (PyObject* tensor : TensorsIn(value)) result.append(py::handle(tensor));
    return result;
  });
}

void bind_owners(py::module_& m) {
  m.def("set_owner", [](const py::object& parameter, int module) {
    set_owner(parameter.ptr(), module_or_keep(module));
  });
  m.def("forget_owner", &forget_owner);
  m.def("follow_gradient", [](const py::object& parameter, int module) {
    follow_gradient(parameter.ptr(), module_or_keep(module));
  });
  m.def("unfollow_gradient",
        [](const py::object& parameter) { unfollow_gradient(parameter.ptr()); });
}

void bind_events(py::module_& m) {
  m.def(
      "start_events",
      [](const std::string& directory, std::uint64_t max_events, const std::string& info_json) {
        if (current_profile_directory() != nullptr) {
          throw std::runtime_error(
              "events are being written already; end the running profile first");
        }
        current_profile_directory() =
            std::make_unique<ProfileDirectory>(directory, max_events, info_json);
      },
      py::arg("directory"), py::arg("max_events"), py::arg("info_json"));
  m.def("stop_events", [] {
    std::unique_ptr<ProfileDirectory> ended = std::move(current_profile_directory());
    const py::gil_scoped_release release;  // joins the file's thread
    ended.reset();
  });
  m.def("write_meta", [] { profile_directory().write_meta(); });
}

void bind_cpu(py::module_& m) {
  m.def("cpu_install", [] { cpu_allocator().install(); });
  m.def("cpu_uninstall", [] { cpu_allocator().uninstall(); });
  m.def("cpu_installed", [] { return cpu_allocator().installed(); });
  m.def("cpu_reported_bytes", &cpu_reported_bytes);
  m.def("cpu_limit", &cpu_limit, py::arg("bytes"));
}

}  // namespace

}  // namespace opacus_memprof

PYBIND11_MODULE(_C, m) {
  using namespace opacus_memprof;
  // A file that cannot be written is Python's OSError, with its errno.
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
  bind_blocks(m);
  bind_owners(m);
  bind_counters(m);
  bind_events(m);
  bind_cpu(m);
  bind_cuda(m);
}
