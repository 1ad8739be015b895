// SPDX-License-Identifier: Apache-2.0
#include "core/replay.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "core/event_reader.h"
#include "core/event_walk.h"
#include "core/replay_fates.h"
#include "core/replay_survey.h"

namespace opacus_memprof {
namespace {

using Device = ReplayResult::Device;
using Moment = ReplayResult::Moment;
using Residue = ReplayResult::Residue;

constexpr std::size_t kLargestBlocks = 50;
constexpr std::size_t kNewestBlocks = 10;

using Shares = std::map<std::uint16_t, CategoryBytes>;

std::vector<ReplayResult::Share> listed(const Shares& shares) {
  std::vector<ReplayResult::Share> result;
  for (const auto& [id, categories] : shares) {
    result.push_back({.id = id, .categories = categories});
  }
  return result;
}

// The second pass: a visitor of walk() that adds up what was live at the survey's instants.
class Accounting {
 public:
  Accounting(const Fates& fates, ReplayResult& result) : fates_(fates), result_(result) {
    for (Device& device : result.devices) books_[device.id].open(device);
  }

  void before(const Event& event, const ReplayTable& table) {
    const auto kind = static_cast<EventKind>(event.kind);
    if (kind == EventKind::alloc || kind == EventKind::free || kind == EventKind::seed) {
      read(books_[event.device], table);
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
    live(block)[fates_.settled(before, block.birth)] -= static_cast<std::int64_t>(block.size);
    live(block)[settled(block)] += static_cast<std::int64_t>(block.size);
  }

  void after(const Event& event, std::uint64_t index) {
    switch (static_cast<EventKind>(event.kind)) {
      case EventKind::step:
      case EventKind::phase:
      case EventKind::snapshot:
        for (const Device& device : result_.devices) books_[device.id].arrive(index);
        break;
      default:
        books_[event.device].arrive(index);
    }
  }

  void ended(const ReplayTable& table) {
    for (const Device& device : result_.devices) read(books_[device.id], table);
  }

 private:
  struct Planned {
    Moment* moment;
    bool at_once;  // else when the device's next block comes or goes
  };

  struct Book {
    Device* device = nullptr;
    CategoryBytes live{};
    std::vector<Planned> plan;  // by event
    std::size_t next = 0;
    std::vector<Moment*> due;

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

    void arrive(std::uint64_t event) {
      for (; next < plan.size() && plan[next].moment->event == event; ++next) {
        if (plan[next].at_once) {
          plan[next].moment->categories = live;
        } else {
          due.push_back(plan[next].moment);
        }
      }
    }
  };

  [[nodiscard]] std::uint8_t settled(const ReplayBlock& block) const {
    return fates_.settled(block.category, block.birth);
  }

  CategoryBytes& live(const ReplayBlock& block) { return books_[block.device()].live; }

  void read(Book& book, const ReplayTable& table) {
    for (Moment* moment : book.due) {
      moment->categories = book.live;
      if (moment == &book.device->peak) detail(*book.device, table);
      if (moment == &book.device->last_step_end) gather_residue(*book.device, table);
    }
    book.due.clear();
  }

  // What only the walk over all live blocks can tell.
  void detail(Device& device, const ReplayTable& table) const {
    Shares modules;
    Shares ops;
    Shares streams;
    Shares threads;
    std::vector<const ReplayBlock*> blocks;
    table.for_each([&](const ReplayBlock& block) {
      if (block.device() != device.id) return;
      const auto bytes = static_cast<std::int64_t>(block.size);
      const std::uint8_t category = settled(block);
      modules[block.module][category] += bytes;
      ops[block.op][category] += bytes;
      streams[block.stream][category] += bytes;
      threads[block.thread][category] += bytes;
      device.born_in[block.phase][category] += bytes;
      blocks.push_back(&block);
    });
    device.modules = listed(modules);
    device.ops = listed(ops);
    device.streams = listed(streams);
    device.threads = listed(threads);
    device.newest_blocks = first(blocks, kNewestBlocks,
                                 [](const auto* a, const auto* b) { return a->birth > b->birth; });
    device.largest_blocks = first(blocks, kLargestBlocks, [](const auto* a, const auto* b) {
      return a->size != b->size ? a->size > b->size : a->birth < b->birth;
    });
  }

  template <typename Before>
  [[nodiscard]] std::vector<ReplayResult::LiveBlock> first(std::vector<const ReplayBlock*>& blocks,
                                                           std::size_t count, Before before) const {
    const auto end = blocks.begin() + static_cast<std::ptrdiff_t>(std::min(count, blocks.size()));
    std::partial_sort(blocks.begin(), end, blocks.end(), before);
    std::vector<ReplayResult::LiveBlock> result;
    for (auto block = blocks.begin(); block != end; ++block) {
      result.push_back({.bytes = (*block)->size,
                        .category = settled(**block),
                        .phase = static_cast<std::uint8_t>((*block)->phase),
                        .module = (*block)->module,
                        .op = (*block)->op,
                        .step = (*block)->step});
    }
    return result;
  }

  // The instant is the end of the step before `last_step_end.step`, which steps count from 0.
  void gather_residue(Device& device, const ReplayTable& table) const {
    using Site = std::tuple<std::uint16_t, std::uint8_t, std::uint8_t, std::uint16_t>;
    std::map<Site, std::pair<Residue, std::set<std::uint32_t>>> found;
    const std::uint32_t ended = device.last_step_end.step;
    table.for_each([&](const ReplayBlock& block) {
      if (block.device() != device.id || block.seeded != 0) return;
      if (block.step < ReplayResult::kWarmUpSteps ||
          block.step + ReplayResult::kRecentSteps >= ended) {
        return;
      }
      const Site site{block.module, settled(block), static_cast<std::uint8_t>(block.phase),
                      block.op};
      auto& [residue, steps] = found[site];
      residue.bytes += static_cast<std::int64_t>(block.size);
      ++residue.blocks;
      steps.insert(block.step);
    });
    for (auto& [key, value] : found) {
      auto& [residue, steps] = value;
      std::tie(residue.module, residue.category, residue.phase, residue.op) = key;
      residue.steps = steps.size();
      residue.first_step = *steps.begin();
      residue.last_step = *steps.rbegin();
      device.residue.push_back(residue);
    }
  }

  const Fates& fates_;
  ReplayResult& result_;
  std::array<Book, 256> books_;  // by device
};

}  // namespace

ReplayResult replay(const std::string& events_path, ReplayOptions options) {
  EventReader reader(events_path);
  ReplayResult result;
  result.header = reader.header();
  Survey survey(reader, options);
  walk(reader, survey, result);
  result.devices = survey.devices();
  Accounting accounting(survey.fates(), result);
  walk(reader, accounting, result);
  return result;
}

}  // namespace opacus_memprof
