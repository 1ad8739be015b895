// SPDX-License-Identifier: Apache-2.0
#include "core/replay_survey.h"

#include <algorithm>
#include <utility>

namespace opacus_memprof {
namespace {

void keep_highest(ReplayResult::Instant& highest, const ReplayResult::Instant& now) {
  if (highest.event == ReplayResult::kNever || now.bytes > highest.bytes) highest = now;
}

}  // namespace

Survey::Survey(const EventReader& reader, const ReplayOptions& options)
    : reader_(reader), clock_(reader.header()) {
  const std::uint64_t rows = std::max<std::uint64_t>(options.timeline_points, 1);
  bucket_events_ = std::max<std::uint64_t>((reader.size() + rows - 1) / rows, 1);
}

Survey::DeviceState& Survey::state(std::uint8_t device) {
  auto& slot = devices_[device];
  if (slot == nullptr) {
    slot = std::make_unique<DeviceState>();
    slot->result.id = device;
  }
  return *slot;
}

void Survey::born(const ReplayBlock& block) {
  outcomes_.born(block);
  state(block.device()).bytes += static_cast<std::int64_t>(block.size);
}

void Survey::died(ReplayBlock& block, const Event& event) {
  outcomes_.died(block, event);
  state(block.device()).bytes -= static_cast<std::int64_t>(block.size);
}

void Survey::after(const Event& event, std::uint64_t index) {
  outcomes_.after(event);
  ++events_;
  set_moment(event, index);
  switch (static_cast<EventKind>(event.kind)) {
    case EventKind::step:
      end_step(event);
      [[fallthrough]];
    case EventKind::phase:
    case EventKind::snapshot:  // of every device
      for (const auto& device : devices_) {
        if (device == nullptr) continue;
        observe(*device);
        if (static_cast<EventKind>(event.kind) == EventKind::snapshot) {
          device->snapshots.push_back({.instant = now_,
                                       .name = static_cast<std::uint16_t>(event.op),
                                       .number = event.size});
        }
      }
      break;
    case EventKind::oom: {
      DeviceState& device = state(static_cast<std::uint8_t>(event.device));
      observe(device);
      auto& oom = device.result.out_of_memory.emplace_back();
      static_cast<Instant&>(oom) = now_;
      oom.requested = event.size;
      oom.category = static_cast<std::uint8_t>(event.category);
      oom.module = static_cast<std::uint16_t>(event.module);
      oom.op = static_cast<std::uint16_t>(event.op);
      break;
    }
    default:
      if (const auto& device = devices_[event.device]; device != nullptr) observe(*device);
  }
}

void Survey::set_moment(const Event& event, std::uint64_t index) {
  now_.event = index;
  now_.time_ns = clock_.time_of(event);
  // A seed has the step and phase of the block's birth, which may be long ago.
  const bool seed = static_cast<EventKind>(event.kind) == EventKind::seed;
  now_.phase = static_cast<std::uint8_t>(seed ? 0 : event.phase);
  const auto step = static_cast<std::uint32_t>(event.step);
  now_.step = seed ? std::max(now_.step, step) : step;
  if (seed) return;
  // The end of a step has the number of the next one.
  const bool ends = static_cast<EventKind>(event.kind) == EventKind::step;
  const std::uint32_t running = ends && step > 0 ? step - 1 : step;
  if (std::exchange(in_gap_, false)) gaps_.back().end_step = running;
  if (step_.has_value()) return;
  step_ = running;
  for (const auto& device : devices_) {
    if (device != nullptr && device->in_step) device->steps.back().number = running;
  }
}

void Survey::end_step(const Event& event) {
  now_.logical_step = event.size;
  after_gap_ = false;
  if (now_.step == *step_) return;
  step_ = now_.step;
  for (const auto& device : devices_) {
    if (device == nullptr || device->steps.empty()) continue;
    if (device->in_step) {
      StepRow& row = device->steps.back();
      row.end_bytes = device->bytes;
      row.complete = row.whole;
      device->in_step = false;
    }
    now_.bytes = device->bytes;
    static_cast<Instant&>(device->result.last_step_end) = now_;
  }
}

void Survey::observe(DeviceState& device) {
  now_.bytes = device.bytes;
  keep_highest(device.result.peak, now_);
  keep_highest(device.result.phases[now_.phase], now_);

  if (!device.in_step) {
    device.in_step = true;
    StepRow& row = device.steps.emplace_back();
    row.number = step_.value_or(now_.step);
    row.whole = !after_gap_;
  }
  keep_highest(device.steps.back().peak, now_);

  const std::uint64_t bucket = (events_ - 1) / bucket_events_;
  if (bucket != device.bucket) {
    device.bucket = bucket;
    device.result.timeline.emplace_back();
  }
  keep_highest(device.result.timeline.back(), now_);
}

void Survey::gap(const EventGap& gap, const ReplayTable& /*table*/) {
  gaps_.push_back({.first_event = gap.first_event,
                   .events = gap.opening->first_event - gap.first_event,
                   .time_ns = now_.time_ns,
                   .end_ns = clock_.resume(gap.opening->ticks),
                   .step = now_.step,
                   .end_step = now_.step});
  in_gap_ = after_gap_ = true;
  now_.logical_step = gap.opening->logical_step;
  step_.reset();
  for (const auto& device : devices_) {
    if (device == nullptr || !device->in_step) continue;
    device->steps.back().end_bytes = device->bytes;
    device->in_step = false;
  }
}

void Survey::ended(const ReplayTable& table) {
  const FileHeader& header = reader_.header();
  const std::uint64_t missing = header.version == kWholeFileVersion ? header.dropped
                                : header.count > reader_.position()
                                    ? header.count - reader_.position()
                                    : 0;
  if (missing > 0) {
    gaps_.push_back({.first_event = reader_.position(),
                     .events = missing,
                     .time_ns = now_.time_ns,
                     .end_ns = clock_.end(),
                     .step = now_.step,
                     .end_step = now_.step});
  }
  const std::uint32_t last = now_.step;
  outcomes_.ended(table, header.closed != 0 && missing == 0, missing > 0 ? &last : nullptr);
}

namespace {

// Leaves the first and the last third of `count` rows, and the highest of the others. Returns how
// many it has removed.
template <typename Row>
std::size_t keep_ends_and_highest(std::vector<Row>& rows, std::size_t count,
                                  ReplayResult::Instant Row::*instant) {
  if (rows.size() <= count) return 0;
  const auto third = static_cast<std::ptrdiff_t>(count / 3);
  const auto middle = rows.begin() + third;
  const auto last = rows.end() - third;
  std::nth_element(middle, middle + third, last, [instant](const Row& a, const Row& b) {
    const ReplayResult::Instant& one = a.*instant;
    const ReplayResult::Instant& other = b.*instant;
    return one.bytes != other.bytes ? one.bytes > other.bytes : one.event < other.event;
  });
  const std::size_t removed = rows.size() - count;
  rows.erase(middle + third, last);
  std::sort(rows.begin(), rows.end(), [instant](const Row& a, const Row& b) {
    return (a.*instant).event < (b.*instant).event;
  });
  return removed;
}

}  // namespace

void Survey::choose_snapshots(DeviceState& device) {
  keep_ends_and_highest(device.snapshots, ReplayResult::kMaxSnapshots, &SnapshotRow::instant);
  for (const SnapshotRow& row : device.snapshots) {
    ReplayResult::Snapshot& snapshot = device.result.snapshots.emplace_back();
    static_cast<Instant&>(snapshot) = row.instant;
    snapshot.name = row.name;
    snapshot.number = row.number;
  }
}

void Survey::choose_steps(DeviceState& device) {
  std::vector<StepRow>& rows = device.steps;
  device.result.steps_left_out =
      keep_ends_and_highest(rows, ReplayResult::kMaxSteps, &StepRow::peak);
  for (const StepRow& row : rows) {
    ReplayResult::Step& step = device.result.steps.emplace_back();
    step.number = row.number;
    static_cast<Instant&>(step.peak) = row.peak;
    step.end_bytes = row.end_bytes;
    step.complete = row.complete;
  }
}

std::vector<ReplayResult::Device> Survey::devices() {
  std::vector<ReplayResult::Device> result;
  for (auto& device : devices_) {
    if (device == nullptr) continue;
    if (device->in_step) device->steps.back().end_bytes = device->bytes;
    choose_steps(*device);
    choose_snapshots(*device);
    device->result.end_bytes = device->bytes;
    result.push_back(std::move(device->result));
    device.reset();
  }
  return result;
}

}  // namespace opacus_memprof
