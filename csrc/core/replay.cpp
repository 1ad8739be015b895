// SPDX-License-Identifier: Apache-2.0
#include "core/replay.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/event_reader.h"
#include "core/event_walk.h"
#include "core/replay_outcomes.h"
#include "core/replay_survey.h"

namespace opacus_memprof {
namespace {

using Device = ReplayResult::Device;
using Moment = ReplayResult::Moment;
using Residue = ReplayResult::Residue;

constexpr std::size_t kLargestBlocks = 50;
constexpr std::size_t kNewestBlocks = 10;

// Bytes by id and category, for millions of additions.
class Shares {
 public:
  CategoryBytes& operator[](std::size_t id) {
    if (id >= by_id_.size()) by_id_.resize(id + 1);
    if (by_id_[id] == nullptr) by_id_[id] = std::make_unique<CategoryBytes>();
    return *by_id_[id];
  }

  [[nodiscard]] std::vector<ReplayResult::Share> listed() const {
    std::vector<ReplayResult::Share> result;
    for (std::size_t id = 0; id < by_id_.size(); ++id) {
      if (by_id_[id] == nullptr) continue;
      result.push_back({.id = static_cast<std::uint16_t>(id), .categories = *by_id_[id]});
    }
    return result;
  }

 private:
  std::vector<std::unique_ptr<CategoryBytes>> by_id_;
};

// Selects, of any number of blocks, the first `count` in an order.
template <typename Before>
class First {
 public:
  First(std::size_t count, Before before) : count_(count), before_(before) {}

  void add(const ReplayBlock& block) {
    kept_.push_back(&block);
    if (kept_.size() == 16 * count_) keep_first();
  }

  [[nodiscard]] const std::vector<const ReplayBlock*>& sorted() {
    if (kept_.size() > count_) keep_first();
    std::sort(kept_.begin(), kept_.end(), before_);
    return kept_;
  }

 private:
  void keep_first() {
    std::nth_element(kept_.begin(), kept_.begin() + static_cast<std::ptrdiff_t>(count_),
                     kept_.end(), before_);
    kept_.resize(count_);
  }

  std::size_t count_;
  Before before_;
  std::vector<const ReplayBlock*> kept_;
};

// The second pass: a visitor of EventWalk that adds up the live memory at the survey's instants.
class Accounting {
 public:
  Accounting(const Outcomes& outcomes, ReplayResult& result)
      : outcomes_(outcomes), result_(result) {
    for (Device& device : result.devices) sums_[device.id].open(device);
  }

  void before(const Event& event, const ReplayTable& table) {
    const auto kind = static_cast<EventKind>(event.kind);
    if (kind == EventKind::alloc || kind == EventKind::free || kind == EventKind::seed) {
      read(sums_[event.device], table);
    }
  }

  void born(const ReplayBlock& block) {
    result_.categories = std::max<std::size_t>(result_.categories, block.category + 1);
    live(block)[settled(block)] += static_cast<std::int64_t>(block.size);
  }

  void died(const ReplayBlock& block, const Event&) {
    live(block)[settled(block)] -= static_cast<std::int64_t>(block.size);
  }

  void retagged(const ReplayBlock& block, std::uint8_t before) {
    result_.categories = std::max<std::size_t>(result_.categories, block.category + 1);
    live(block)[outcomes_.settled(before, block.birth)] -= static_cast<std::int64_t>(block.size);
    live(block)[settled(block)] += static_cast<std::int64_t>(block.size);
  }

  void after(const Event& event, std::uint64_t index) {
    switch (static_cast<EventKind>(event.kind)) {
      case EventKind::step:
      case EventKind::phase:
      case EventKind::snapshot:
        for (const Device& device : result_.devices) sums_[device.id].reach(index);
        break;
      default:
        sums_[event.device].reach(index);
    }
  }

  void gap(const EventGap& gap, const ReplayTable& table) {
    for (const Device& device : result_.devices) {
      if (gap.devices[device.id]) read(sums_[device.id], table);
    }
  }
  void outcome_known(const ReplayBlock&, std::uint16_t) {}
  void resumed(const Opening&, const Births&) {}

  void ended(const ReplayTable& table) {
    for (const Device& device : result_.devices) read(sums_[device.id], table);
  }

 private:
  struct Planned {
    Moment* moment;
    bool at_once;  // otherwise when the device's next block is allocated or freed
  };

  // The live memory of a device by category, and the moments that receive it.
  struct DeviceSums {
    Device* device = nullptr;
    CategoryBytes live{};
    std::vector<Planned> plan;  // by event
    std::size_t next = 0;
    std::vector<Moment*> pending;

    void open(Device& of) {
      device = &of;
      plan.push_back({&of.peak, false});
      plan.push_back({&of.last_step_end, false});
      for (Moment& moment : of.phases) plan.push_back({&moment, false});
      for (auto& step : of.steps) plan.push_back({&step.peak, false});
      for (Moment& moment : of.timeline) plan.push_back({&moment, false});
      for (Moment& moment : of.snapshots) plan.push_back({&moment, true});
      for (Moment& moment : of.out_of_memory) plan.push_back({&moment, true});
      std::sort(plan.begin(), plan.end(), [](const Planned& a, const Planned& b) {
        return a.moment->event < b.moment->event;
      });
    }

    void reach(std::uint64_t event) {
      for (; next < plan.size() && plan[next].moment->event == event; ++next) {
        if (plan[next].at_once) {
          plan[next].moment->categories = live;
        } else {
          pending.push_back(plan[next].moment);
        }
      }
    }
  };

  [[nodiscard]] std::uint8_t settled(const ReplayBlock& block) const {
    return outcomes_.settled(block.category, block.birth);
  }

  CategoryBytes& live(const ReplayBlock& block) { return sums_[block.device()].live; }

  void read(DeviceSums& sums, const ReplayTable& table) {
    for (Moment* moment : sums.pending) {
      moment->categories = sums.live;
      if (moment == &sums.device->peak) detail(*sums.device, table);
      if (moment == &sums.device->last_step_end) gather_residue(*sums.device, table);
    }
    sums.pending.clear();
  }

  // Computes figures that need a pass over all live blocks.
  void detail(Device& device, const ReplayTable& table) const {
    Shares modules;
    Shares ops;
    Shares streams;
    Shares threads;
    First newest(kNewestBlocks, [](const auto* a, const auto* b) { return a->birth > b->birth; });
    First largest(kLargestBlocks, [](const auto* a, const auto* b) {
      return a->size != b->size ? a->size > b->size : a->birth < b->birth;
    });
    table.for_each([&](const ReplayBlock& block) {
      if (block.device() != device.id) return;
      const auto bytes = static_cast<std::int64_t>(block.size);
      const std::uint8_t category = settled(block);
      modules[outcomes_.module(block)][category] += bytes;
      ops[block.op][category] += bytes;
      streams[block.stream][category] += bytes;
      threads[block.thread][category] += bytes;
      device.born_in[block.phase][category] += bytes;
      newest.add(block);
      largest.add(block);
    });
    device.modules = modules.listed();
    device.ops = ops.listed();
    device.streams = streams.listed();
    device.threads = threads.listed();
    device.newest_blocks = listed(newest.sorted());
    device.largest_blocks = listed(largest.sorted());
  }

  [[nodiscard]] std::vector<ReplayResult::LiveBlock> listed(
      const std::vector<const ReplayBlock*>& blocks) const {
    std::vector<ReplayResult::LiveBlock> result;
    result.reserve(blocks.size());
    for (const ReplayBlock* block : blocks) {
      result.push_back({.bytes = block->size,
                        .category = settled(*block),
                        .phase = static_cast<std::uint8_t>(block->phase),
                        .module = outcomes_.module(*block),
                        .op = block->op,
                        .step = block->step});
    }
    return result;
  }

  // The instant is the end of the step before `last_step_end.step`, because steps count from 0.
  void gather_residue(Device& device, const ReplayTable& table) const {
    struct Site {
      Residue residue;
      std::vector<std::uint32_t> steps;  // in the order of the table
    };
    std::unordered_map<std::uint64_t, Site> found;  // by the fields that order the residue
    const std::uint32_t ended = device.last_step_end.step;
    table.for_each([&](const ReplayBlock& block) {
      if (block.device() != device.id || block.seeded != 0) return;
      if (block.step < ReplayResult::kWarmUpSteps ||
          block.step + ReplayResult::kRecentSteps >= ended) {
        return;
      }
      const std::uint8_t category = settled(block);
      auto& [residue, steps] =
          found[std::uint64_t{outcomes_.module(block)} << 32U | std::uint64_t{category} << 24U |
                std::uint64_t{block.phase} << 16U | block.op];
      if (residue.blocks++ == 0) {
        residue.module = outcomes_.module(block);
        residue.category = category;
        residue.phase = block.phase;
        residue.op = block.op;
        residue.first_step = residue.last_step = block.step;
      }
      residue.bytes += static_cast<std::int64_t>(block.size);
      residue.first_step = std::min(residue.first_step, block.step);
      residue.last_step = std::max(residue.last_step, block.step);
      if (steps.empty() || steps.back() != block.step) steps.push_back(block.step);
    });
    std::vector<std::uint64_t> keys;
    keys.reserve(found.size());
    for (const auto& [key, site] : found) keys.push_back(key);
    std::sort(keys.begin(), keys.end());
    for (const std::uint64_t key : keys) {
      auto& [residue, steps] = found[key];
      std::sort(steps.begin(), steps.end());
      residue.steps =
          static_cast<std::uint64_t>(std::unique(steps.begin(), steps.end()) - steps.begin());
      device.residue.push_back(residue);
    }
  }

  const Outcomes& outcomes_;
  ReplayResult& result_;
  std::array<DeviceSums, 256> sums_;  // by device
};

}  // namespace

ReplayResult replay(const std::string& events_path, ReplayOptions options) {
  EventReader reader(events_path);
  ReplayResult result;
  result.header = reader.header();
  Survey survey(reader, options);
  EventWalk first(survey);
  first.visit_all(reader);
  result.devices = survey.devices();
  result.gaps = survey.gaps();
  result.events = survey.events();
  Accounting accounting(survey.outcomes(), result);
  EventWalk second(accounting, first.release_table());
  second.visit_all(reader);
  result.contradictions = second.contradictions();
  return result;
}

}  // namespace opacus_memprof
