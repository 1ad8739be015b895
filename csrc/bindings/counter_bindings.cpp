// SPDX-License-Identifier: Apache-2.0
// Counters, peaks, blocks and failures, with names instead of ids: a table of fields for each
// struct.
#include <optional>

#include "allocators/profiled_allocator.h"
#include "bindings/bindings.h"
#include "bindings/dicts.h"
#include "core/names.h"
#include "core/recorder.h"

namespace py = pybind11;

namespace opacus_memprof {

namespace {

using Kind = Names::Kind;

// Getters, for the tables below, of the names of ids.
auto name_of(Kind kind, auto id) {
  return [=](const auto& value) { return names().name(kind, std::invoke(id, value)); };
}
auto phase_of(auto id) {
  return [=](const auto& value) { return kPhaseNames[std::invoke(id, value)]; };
}
auto device_of(auto id) {
  return [=](const auto& value) { return device_name(std::invoke(id, value)); };
}
auto tag_of(auto tag, auto field) {
  return [=](const auto& value) { return std::invoke(field, std::invoke(tag, value)); };
}

// None for an unavailable figure.
auto if_known(std::int64_t UpstreamAtFailure::*bytes) {
  return [=](const UpstreamAtFailure& upstream) {
    return upstream.*bytes < 0 ? std::nullopt : std::optional(upstream.*bytes);
  };
}

}  // namespace

static auto fields(const ReservedPeak&) {
  return std::tuple{Field{"bytes",
                          [](const ReservedPeak& peak) {
                            return peak.bytes < 0 ? std::nullopt : std::optional(peak.bytes);
                          }},
                    Field{"step", &ReservedPeak::step},
                    Field{"phase", phase_of(&ReservedPeak::phase)}};
}

static auto fields(const Recorder::DeviceBytes&) {
  using S = Recorder::DeviceBytes;
  return std::tuple{Field{"requested_bytes", &S::requested}, Field{"categories", &S::categories}};
}

static auto fields(const Recorder::DeviceState& state) {
  using S = Recorder::DeviceState;
  const Recorder::DeviceBytes& bytes = state;
  return std::tuple_cat(fields(bytes), std::tuple{Field{"peak_bytes", &S::highest},
                                                  Field{"phase", phase_of(&S::phase)},
                                                  Field{"reserved_peak", &S::reserved}});
}

static auto fields(const Recorder::State&) {
  using S = Recorder::State;
  return std::tuple{Field{"unix_ns", &S::unix_ns}, Field{"step", &S::step},
                    Field{"logical_step", &S::logical_step}, Field{"devices", &S::devices}};
}

static auto fields(const Recorder::Snapshot&) {
  using S = Recorder::Snapshot;
  return std::tuple{Field{"index", &S::index},
                    Field{"name", &S::name},
                    Field{"unix_ns", &S::unix_ns},
                    Field{"step", &S::step},
                    Field{"logical_step", &S::logical_step},
                    Field{"devices", [](const S& snapshot) {
                            return std::vector<Recorder::DeviceBytes>(snapshot.devices.begin(),
                                                                      snapshot.devices.end());
                          }}};
}

static auto fields(const Recorder::DevicePeak&) {
  using Peak = Recorder::DevicePeak;
  return std::tuple{Field{"reserved_peak", &Peak::reserved},
                    Field{"requested_bytes", &Peak::requested},
                    Field{"upstream_requested_bytes", &Peak::upstream_requested},
                    Field{"allocated_bytes", &Peak::upstream_allocated},
                    Field{"reserved_bytes", &Peak::upstream_reserved},
                    Field{"step", &Peak::step},
                    Field{"phase", phase_of(&Peak::phase)},
                    Field{"unix_ns", &Peak::unix_ns},
                    Field{"categories", &Peak::categories}};
}

static auto fields(const Block&) {
  return std::tuple{Field{"address", &Block::address},
                    Field{"bytes", &Block::size},
                    Field{"category", name_of(Kind::category, &Block::category)},
                    Field{"phase", [](const Block& block) { return kPhaseNames[block.phase]; }},
                    Field{"module", name_of(Kind::module, &Block::module)},
                    Field{"op", name_of(Kind::op, &Block::op)},
                    Field{"step", &Block::step},
                    Field{"device", device_of(&Block::device)},
                    Field{"stream", name_of(Kind::stream, &Block::stream)},
                    Field{"thread", name_of(Kind::thread, &Block::thread)},
                    Field{"seeded", [](const Block& block) { return int{block.seeded}; }}};
}

static auto fields(const Holding&) {
  return std::tuple{Field{"bytes", &Holding::bytes},
                    Field{"blocks", &Holding::blocks},
                    Field{"largest", &Holding::largest},
                    Field{"category", name_of(Kind::category, &Holding::category)},
                    Field{"module", name_of(Kind::module, &Holding::module)},
                    Field{"op", name_of(Kind::op, &Holding::op)},
                    Field{"phase", phase_of(&Holding::phase)},
                    Field{"step", &Holding::step}};
}

static auto fields(const UpstreamAtFailure&) {
  using S = UpstreamAtFailure;
  return std::tuple{Field{"reserved", if_known(&S::reserved)},
                    Field{"allocated", if_known(&S::allocated)},
                    Field{"pending", if_known(&S::pending)},
                    Field{"largest_free", if_known(&S::largest_free)},
                    Field{"free_segments", if_known(&S::free_segments)},
                    Field{"free_expandable", if_known(&S::free_expandable)},
                    Field{"device_free", if_known(&S::device_free)},
                    Field{"device_total", if_known(&S::device_total)},
                    Field{"limit", if_known(&S::limit)}};
}

static auto fields(const Failure&) {
  const auto tag = [](auto field) { return tag_of(&Failure::tag, field); };
  return std::tuple{Field{"number", &Failure::number},
                    Field{"requested", &Failure::requested},
                    Field{"unix_ns", &Failure::unix_ns},
                    Field{"step", &Failure::step},
                    Field{"logical_step", &Failure::logical_step},
                    Field{"device", device_of(&Failure::device)},
                    Field{"category", name_of(Kind::category, tag(&Tag::category))},
                    Field{"phase", phase_of(tag(&Tag::phase))},
                    Field{"module", name_of(Kind::module, tag(&Tag::module))},
                    Field{"op", name_of(Kind::op, tag(&Tag::op))},
                    Field{"holdings", &Failure::holdings},
                    Field{"upstream", &Failure::upstream}};
}

static auto fields(const EventLog::Status&) {
  using S = EventLog::Status;
  return std::tuple{Field{"recording", &S::recording}, Field{"written", &S::written},
                    Field{"dropped", &S::dropped}, Field{"error", &S::error}};
}

namespace {

// Converts types without a table of fields.
struct NameConverter {
  // Built-in categories always, the program's own if they have names.
  py::object operator()(const CategoryBytes& bytes) const {
    py::dict result;
    std::size_t id = 0;
    for (const std::string& name : names().list(Kind::category)) result[name.c_str()] = bytes[id++];
    return result;
  }

  // By the device's name.
  template <typename Item>
  requires std::derived_from<Item, Recorder::DeviceBytes> ||
      std::same_as<Item, Recorder::DevicePeak>
          py::object operator()(const std::vector<Item>& items) const {
    py::dict result;
    for (const Item& item : items) {
      result[device_name(item.device).c_str()] = opacus_memprof::to_python(item, *this);
    }
    return result;
  }
};

template <typename Value>
py::object as_python(const Value& value) {
  return to_python(value, NameConverter{});
}

}  // namespace

void bind_counters(py::module_& m) {
  m.def("snapshot", [](const std::string& name) { return as_python(recorder().snapshot(name)); });
  m.def("counters", [] { return as_python(recorder().state()); });
  m.def("peaks", [] { return as_python(closed_peaks()); });
  m.def("reset_peaks", [] { reset_peaks(); });
  m.def("live_blocks", [] { return as_python(recorder().live_blocks()); });
  m.def("failures", [] { return as_python(recorder().failures()); });
  m.def("events_status", [] { return as_python(recorder().events_status()); });
}

}  // namespace opacus_memprof
