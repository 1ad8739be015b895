// SPDX-License-Identifier: Apache-2.0
#include "hooks/python_tag.h"

#include <string>

#include "core/names.h"
#include "hooks/arguments.h"

namespace py = pybind11;

namespace opacus_memprof {

namespace {

using Kind = Names::Kind;

// False for None. Throws py::error_already_set.
template <typename Value>
bool read(py::handle object, Value& value) {
  if (object.is_none()) return false;
  if (!from_python(object.ptr(), value)) throw py::error_already_set();
  return true;
}

py::object name_or_none(Kind kind, std::uint16_t id, std::uint16_t keep) {
  if (id == keep) return py::none();
  return py::str(names().name(kind, id));
}

std::uint16_t intern(Kind kind, py::handle name) {
  return names().intern(kind, name.cast<std::string>());
}

}  // namespace

Tag make_tag(py::handle category, py::handle phase, py::handle module, py::handle op) {
  Tag tag;
  Phase phase_value{};
  OpId op_value;
  read(category, tag.category);
  if (read(phase, phase_value)) tag.phase = static_cast<std::uint8_t>(phase_value);
  read(module, tag.module);
  if (read(op, op_value)) tag.op = op_value.id;
  return tag;
}

py::object enter_tag(py::object self) {
  this_thread().push(self.cast<const Tag&>());
  return self;
}

void exit_tag(const Tag& /*tag*/, const py::args& /*exception*/) { this_thread().pop(); }

py::tuple tag_to_names(const Tag& tag) {
  const py::object phase =
      tag.phase == kKeep8 ? py::object(py::none()) : py::str(kPhaseNames[tag.phase]);
  return py::make_tuple(name_or_none(Kind::category, tag.category, kKeep8), phase,
                        name_or_none(Kind::module, tag.module, kKeep16),
                        name_or_none(Kind::op, tag.op, kKeep16));
}

Tag tag_from_names(const py::tuple& tag_names) {
  const py::object category = tag_names[0];
  const py::object phase = tag_names[1];
  const py::object module = tag_names[2];
  const py::object op = tag_names[3];
  Tag tag;
  if (!category.is_none())
    tag.category = static_cast<std::uint8_t>(intern(Kind::category, category));
  if (!phase.is_none()) tag.phase = phase_id(phase.cast<std::string>());
  if (!module.is_none()) tag.module = intern(Kind::module, module);
  if (!op.is_none()) tag.op = intern(Kind::op, op);
  return tag;
}

}  // namespace opacus_memprof
