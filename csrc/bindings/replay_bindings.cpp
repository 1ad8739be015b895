// SPDX-License-Identifier: Apache-2.0
// replay() as plain dicts: core/replay.h with ids instead of names, and a list of bytes by category
// id wherever it has categories.
#include "bindings/replay_bindings.h"

#include <pybind11/stl.h>

#include <span>
#include <string>

#include "core/event_rows.h"
#include "core/replay.h"

namespace opacus_memprof {
namespace {

namespace py = pybind11;
using namespace py::literals;

class Conversion {
 public:
  explicit Conversion(const ReplayResult& result) : result_(result) {}

  [[nodiscard]] py::dict operator()() const {
    const FileHeader& header = result_.header;
    return py::dict(
        "header"_a =
            py::dict("version"_a = header.version, "count"_a = header.count,
                     "dropped"_a = header.dropped, "capacity"_a = header.capacity,
                     "pid"_a = header.pid, "start_unix_ns"_a = header.start_unix_ns,
                     "last_unix_ns"_a = header.last_unix_ns, "closed"_a = header.closed != 0),
        "events"_a = result_.events,
        "contradictions"_a = py::dict("unknown_frees"_a = result_.unknown_frees,
                                      "unknown_retags"_a = result_.unknown_retags,
                                      "double_allocations"_a = result_.double_allocations,
                                      "category_mismatches"_a = result_.category_mismatches,
                                      "unreadable"_a = result_.unreadable),
        "category_names"_a = names(kCategoryNames), "phase_names"_a = names(kPhaseNames),
        "devices"_a = list(result_.devices, [this](const auto& one) { return device(one); }));
  }

 private:
  template <typename Items, typename Function>
  static py::list list(const Items& items, Function convert) {
    py::list result;
    for (const auto& item : items) result.append(convert(item));
    return result;
  }

  template <typename Names>
  static py::list names(const Names& names) {
    return list(names, [](std::string_view name) { return py::str(name.data(), name.size()); });
  }

  [[nodiscard]] py::list categories(const CategoryBytes& bytes) const {
    py::list result(result_.categories);
    for (std::size_t id = 0; id < result_.categories; ++id) result[id] = bytes[id];
    return result;
  }

  [[nodiscard]] py::dict shares(const std::vector<ReplayResult::Share>& shares) const {
    py::dict result;
    for (const auto& [id, bytes] : shares) result[py::int_(id)] = categories(bytes);
    return result;
  }

  [[nodiscard]] py::dict moment(const ReplayResult::Moment& moment) const {
    return py::dict("event"_a = moment.event, "time_ns"_a = moment.time_ns,
                    "bytes"_a = moment.bytes, "step"_a = moment.step,
                    "logical_step"_a = moment.logical_step, "phase"_a = moment.phase,
                    "categories"_a = categories(moment.categories));
  }

  [[nodiscard]] py::dict step(const ReplayResult::Step& step) const {
    py::dict result = moment(step.peak);
    result["step"] = step.number;
    result["end_bytes"] = step.end_bytes;
    result["complete"] = step.complete;
    return result;
  }

  [[nodiscard]] py::dict snapshot(const ReplayResult::Snapshot& snapshot) const {
    py::dict result = moment(snapshot);
    result["name"] = snapshot.name;
    result["number"] = snapshot.number;
    return result;
  }

  [[nodiscard]] py::dict out_of_memory(const ReplayResult::OutOfMemory& oom) const {
    py::dict result = moment(oom);
    result["requested"] = oom.requested;
    result["category"] = oom.category;
    result["module"] = oom.module;
    result["op"] = oom.op;
    return result;
  }

  [[nodiscard]] py::dict device(const ReplayResult::Device& device) const {
    py::dict phases;
    for (std::size_t phase = 0; phase < kPhases; ++phase) {
      if (device.phases[phase].event == ReplayResult::kNever) continue;
      phases[py::int_(phase)] = moment(device.phases[phase]);
    }
    const auto block = [](const ReplayResult::LiveBlock& block) {
      return py::dict("bytes"_a = block.bytes, "category"_a = block.category,
                      "phase"_a = block.phase, "module"_a = block.module, "op"_a = block.op,
                      "step"_a = block.step);
    };
    const auto residue = [](const ReplayResult::Residue& one) {
      return py::dict("module"_a = one.module, "category"_a = one.category, "phase"_a = one.phase,
                      "op"_a = one.op, "bytes"_a = one.bytes, "blocks"_a = one.blocks,
                      "steps"_a = one.steps, "first_step"_a = one.first_step,
                      "last_step"_a = one.last_step);
    };
    return py::dict(
        "id"_a = device.id, "peak"_a = moment(device.peak), "modules"_a = shares(device.modules),
        "ops"_a = shares(device.ops), "streams"_a = shares(device.streams),
        "threads"_a = shares(device.threads),
        "born_in"_a = list(device.born_in, [this](const auto& one) { return categories(one); }),
        "largest_blocks"_a = list(device.largest_blocks, block),
        "newest_blocks"_a = list(device.newest_blocks, block), "phases"_a = phases,
        "steps"_a = list(device.steps, [this](const auto& one) { return step(one); }),
        "steps_left_out"_a = device.steps_left_out,
        "timeline"_a = list(device.timeline, [this](const auto& one) { return moment(one); }),
        "snapshots"_a = list(device.snapshots, [this](const auto& one) { return snapshot(one); }),
        "out_of_memory"_a =
            list(device.out_of_memory, [this](const auto& one) { return out_of_memory(one); }),
        "last_step_end"_a = moment(device.last_step_end),
        "residue"_a = list(device.residue, residue), "end_bytes"_a = device.end_bytes);
  }

  const ReplayResult& result_;
};

}  // namespace

void bind_replay(py::module_& m) {
  m.attr("BUILTIN_CATEGORIES") = py::cast(kCategoryNames);
  m.attr("BUILTIN_PHASES") = py::cast(kPhaseNames);
  m.def(
      "replay",
      [](const std::string& directory, std::size_t timeline_points) {
        const ReplayResult result = [&] {
          const py::gil_scoped_release release;
          return replay(directory + "/events.bin", {.timeline_points = timeline_points});
        }();
        return Conversion(result)();
      },
      "directory"_a, "timeline_points"_a = 2000,
      "What directory/events.bin says; core/replay.h documents the fields. Raises RuntimeError.");
  m.def(
      "for_event_rows",
      [](const std::string& directory, const py::function& take) {
        for_event_rows(directory + "/events.bin", [&](std::span<const EventRow> rows) {
          take(py::bytes(reinterpret_cast<const char*>(rows.data()), rows.size_bytes()));
        });
      },
      "directory"_a, "take"_a,
      "Calls take(bytes) with all rows of core/event_rows.h, in pieces. Raises RuntimeError.");
}

}  // namespace opacus_memprof
