// SPDX-License-Identifier: Apache-2.0
// The extension that reads profiles. It is built without torch and loads without it; _core.pyi
// explains each definition. core/replay.h and core/follower.h document the fields, which have ids
// instead of names.
#include <array>
#include <map>
#include <memory>
#include <ranges>
#include <span>
#include <string>
#include <vector>

#include "bindings/dicts.h"
#include "core/event_rows.h"
#include "core/follower.h"
#include "core/replay.h"
#include "core/torch_snapshot.h"

namespace py = pybind11;
using namespace py::literals;

namespace opacus_memprof {

static auto fields(const FileHeader&) {
  using H = FileHeader;
  return std::tuple{Field{"version", &H::version},
                    Field{"count", &H::count},
                    Field{"dropped", &H::dropped},
                    Field{"capacity", &H::capacity},
                    Field{"pid", &H::pid},
                    Field{"start_unix_ns", &H::start_unix_ns},
                    Field{"last_unix_ns", &H::last_unix_ns},
                    Field{"closed", [](const H& header) { return header.closed != 0; }}};
}

static auto fields(const Contradictions&) {
  using C = Contradictions;
  return std::tuple{
      Field{"unknown_frees", &C::unknown_frees}, Field{"unknown_retags", &C::unknown_retags},
      Field{"double_allocations", &C::double_allocations},
      Field{"category_mismatches", &C::category_mismatches}, Field{"unreadable", &C::unreadable}};
}

static auto fields(const ReplayResult::Moment&) {
  using M = ReplayResult::Moment;
  return std::tuple{Field{"event", &M::event},
                    Field{"time_ns", &M::time_ns},
                    Field{"bytes", &M::bytes},
                    Field{"step", &M::step},
                    Field{"logical_step", &M::logical_step},
                    Field{"phase", &M::phase},
                    Field{"categories", &M::categories}};
}

static auto fields(const ReplayResult::Step& step) {
  using S = ReplayResult::Step;
  const auto of_peak = [](const auto&... field) {
    return std::tuple{
        Field{field.name, [get = field.get](const S& s) { return std::invoke(get, s.peak); }}...};
  };
  return std::tuple_cat(std::apply(of_peak, fields(step.peak)),
                        std::tuple{Field{"step", &S::number}, Field{"end_bytes", &S::end_bytes},
                                   Field{"complete", &S::complete}});
}

static auto fields(const ReplayResult::Snapshot& snapshot) {
  using S = ReplayResult::Snapshot;
  return std::tuple_cat(fields(static_cast<const ReplayResult::Moment&>(snapshot)),
                        std::tuple{Field{"name", &S::name}, Field{"number", &S::number}});
}

static auto fields(const ReplayResult::OutOfMemory& oom) {
  using O = ReplayResult::OutOfMemory;
  return std::tuple_cat(
      fields(static_cast<const ReplayResult::Moment&>(oom)),
      std::tuple{Field{"requested", &O::requested}, Field{"category", &O::category},
                 Field{"module", &O::module}, Field{"op", &O::op}});
}

static auto fields(const ReplayResult::LiveBlock&) {
  using B = ReplayResult::LiveBlock;
  return std::tuple{Field{"bytes", &B::bytes}, Field{"category", &B::category},
                    Field{"phase", &B::phase}, Field{"module", &B::module},
                    Field{"op", &B::op},       Field{"step", &B::step}};
}

static auto fields(const ReplayResult::Residue&) {
  using R = ReplayResult::Residue;
  return std::tuple{Field{"module", &R::module},      Field{"category", &R::category},
                    Field{"phase", &R::phase},        Field{"op", &R::op},
                    Field{"bytes", &R::bytes},        Field{"blocks", &R::blocks},
                    Field{"steps", &R::steps},        Field{"first_step", &R::first_step},
                    Field{"last_step", &R::last_step}};
}

static auto fields(const ReplayResult::Device&) {
  using D = ReplayResult::Device;
  return std::tuple{Field{"id", &D::id},
                    Field{"peak", &D::peak},
                    Field{"modules", &D::modules},
                    Field{"ops", &D::ops},
                    Field{"streams", &D::streams},
                    Field{"threads", &D::threads},
                    Field{"born_in", &D::born_in},
                    Field{"largest_blocks", &D::largest_blocks},
                    Field{"newest_blocks", &D::newest_blocks},
                    Field{"phases", &D::phases},
                    Field{"steps", &D::steps},
                    Field{"steps_left_out", &D::steps_left_out},
                    Field{"timeline", &D::timeline},
                    Field{"snapshots", &D::snapshots},
                    Field{"out_of_memory", &D::out_of_memory},
                    Field{"last_step_end", &D::last_step_end},
                    Field{"residue", &D::residue},
                    Field{"end_bytes", &D::end_bytes}};
}

static auto fields(const ReplayResult::Gap&) {
  using G = ReplayResult::Gap;
  return std::tuple{Field{"first_event", &G::first_event},
                    Field{"events", &G::events},
                    Field{"time_ns", &G::time_ns},
                    Field{"end_ns", &G::end_ns},
                    Field{"step", &G::step},
                    Field{"end_step", &G::end_step}};
}

static auto fields(const ReplayResult&) {
  using R = ReplayResult;
  return std::tuple{Field{"header", &R::header},
                    Field{"events", &R::events},
                    Field{"contradictions", &R::contradictions},
                    Field{"category_names", [](const R&) { return kCategoryNames; }},
                    Field{"phase_names", [](const R&) { return kPhaseNames; }},
                    Field{"devices", &R::devices},
                    Field{"gaps", &R::gaps}};
}

static auto fields(const Follower::Device&) {
  using D = Follower::Device;
  return std::tuple{Field{"id", &D::id},
                    Field{"bytes", &D::bytes},
                    Field{"peak_bytes", &D::peak_bytes},
                    Field{"peak_step", &D::peak_step},
                    Field{"step_ends", &D::step_ends},
                    Field{"categories", &D::categories},
                    Field{"modules", &D::modules}};
}

static auto fields(const Follower&) {
  using F = Follower;
  const auto header = [](auto member) {
    return [=](const F& follower) { return follower.header().*member; };
  };
  return std::tuple{Field{"category_names", [](const F&) { return kCategoryNames; }},
                    Field{"phase_names", [](const F&) { return kPhaseNames; }},
                    Field{"pid", header(&FileHeader::pid)},
                    Field{"closed", [](const F& f) { return f.header().closed != 0; }},
                    Field{"dropped", header(&FileHeader::dropped)},
                    Field{"start_unix_ns", header(&FileHeader::start_unix_ns)},
                    Field{"last_unix_ns", header(&FileHeader::last_unix_ns)},
                    Field{"events", &F::events},
                    Field{"step", &F::step},
                    Field{"logical_step", &F::logical_step},
                    Field{"phase", &F::phase},
                    Field{"out_of_memory", &F::out_of_memory},
                    Field{"devices", &F::devices}};
}

namespace {

// Converts types without a table of fields.
class IdConverter {
 public:
  // Beyond the first `categories` ids every figure is 0.
  explicit IdConverter(std::size_t categories) : categories_(categories) {}

  py::object operator()(const CategoryBytes& bytes) const {
    return as_python(std::span(bytes).first(categories_));
  }
  py::object operator()(const std::vector<ReplayResult::Share>& shares) const {
    py::dict result;
    for (const auto& [id, bytes] : shares) result[py::int_(id)] = (*this)(bytes);
    return result;
  }
  py::object operator()(const std::map<std::uint16_t, CategoryBytes>& shares) const {
    py::dict result;
    for (const auto& [id, bytes] : shares) result[py::int_(id)] = (*this)(bytes);
    return result;
  }
  py::object operator()(const std::map<std::uint8_t, Follower::Device>& devices) const {
    return as_python(std::views::values(devices));
  }
  // By phase, except phases that never occurred.
  py::object operator()(const std::array<ReplayResult::Moment, kPhases>& phases) const {
    py::dict result;
    for (std::size_t phase = 0; phase < kPhases; ++phase) {
      if (phases[phase].event == ReplayResult::kNever) continue;
      result[py::int_(phase)] = as_python(phases[phase]);
    }
    return result;
  }

 private:
  template <typename Value>
  [[nodiscard]] py::object as_python(const Value& value) const {
    return to_python(value, *this);
  }

  std::size_t categories_;
};

// The structs as they lie in memory, for numpy.
template <typename Struct>
py::bytes as_bytes(const std::vector<Struct>& structs) {
  const auto bytes = std::as_bytes(std::span(structs));
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

py::dict as_dict(const TorchSnapshot& snapshot) {
  py::list strings;
  for (const std::string& text : snapshot.strings) {
    const auto size = static_cast<py::ssize_t>(text.size());
    strings.append(
        py::reinterpret_steal<py::str>(PyUnicode_DecodeUTF8(text.data(), size, "replace")));
  }
  return py::dict("strings"_a = strings, "frames"_a = as_bytes(snapshot.frames),
                  "calls"_a = as_bytes(snapshot.calls), "entries"_a = as_bytes(snapshot.entries),
                  "blocks"_a = as_bytes(snapshot.blocks),
                  "segments"_a = as_bytes(snapshot.segments));
}

}  // namespace

}  // namespace opacus_memprof

PYBIND11_MODULE(_core, m) {
  using namespace opacus_memprof;
  m.attr("BUILTIN_CATEGORIES") = py::cast(kCategoryNames);
  m.attr("BUILTIN_PHASES") = py::cast(kPhaseNames);
  m.def(
      "replay",
      [](const std::string& directory, std::size_t timeline_points) {
        const ReplayResult result = [&] {
          const py::gil_scoped_release release;
          return replay(directory + "/events.bin", {.timeline_points = timeline_points});
        }();
        return to_python(result, IdConverter(result.categories));
      },
      "directory"_a, "timeline_points"_a = 2000,
      "What directory/events.bin says; core/replay.h documents the fields. Raises RuntimeError.");
  m.def(
      "for_event_rows",
      [](const std::string& directory, const py::function& on_rows) {
        for_event_rows(directory + "/events.bin", [&](std::span<const EventRow> rows) {
          on_rows(py::bytes(reinterpret_cast<const char*>(rows.data()), rows.size_bytes()));
        });
      },
      "directory"_a, "on_rows"_a,
      "Calls on_rows(bytes) with all rows of core/event_rows.h, in pieces. Raises RuntimeError.");
  m.def(
      "read_torch_snapshot",
      [](const std::string& path) {
        const TorchSnapshot snapshot = [&] {
          const py::gil_scoped_release release;
          return read_torch_snapshot(path);
        }();
        return as_dict(snapshot);
      },
      "path"_a,
      "The pickle of torch.cuda.memory._dump_snapshot; runs no code. Raises RuntimeError.");
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
            return to_python(follower, IdConverter(kMaxCategories));
          },
          "Reads what was written since; what is live now, with ids as replay() has them.");
}
