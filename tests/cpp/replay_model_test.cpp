// SPDX-License-Identifier: Apache-2.0
// Replay against a model that knows every life as a whole and looks at each instant anew:
// quadratic, and with nothing in common with the code under test but the definition of an event.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/replay.h"
#include "event_file_builder.h"

namespace opacus_memprof {
namespace {

using testing::EventFileBuilder;
using testing::EventSpec;

constexpr std::size_t kEvents = 250;

using Categories = std::map<std::uint8_t, std::int64_t>;  // without zeros

Categories without_zeros(const CategoryBytes& bytes) {
  Categories result;
  for (std::size_t id = 0; id < bytes.size(); ++id) {
    if (bytes[id] != 0) result[static_cast<std::uint8_t>(id)] = bytes[id];
  }
  return result;
}

class Model {
 public:
  explicit Model(const EventFileBuilder& file) : file_(file), events_(file.events) {
    for (std::size_t i = 0; i < events_.size(); ++i) {
      if (is(i, EventKind::alloc) || is(i, EventKind::seed)) follow(i);
    }
  }

  [[nodiscard]] std::size_t size() const { return events_.size(); }

  [[nodiscard]] std::int64_t bytes(std::uint8_t device, std::size_t instant) const {
    std::int64_t total = 0;
    for (const Life& life : lives_) {
      if (life.device == device && life.covers(instant)) total += life.size;
    }
    return total;
  }

  [[nodiscard]] Categories categories(std::uint8_t device, std::size_t instant) const {
    Categories result;
    for (const Life& life : lives_) {
      if (life.device != device || !life.covers(instant)) continue;
      if (life.size != 0) result[settled(life, instant)] += life.size;
    }
    return result;
  }

  // The last event before the device's next block comes or goes.
  [[nodiscard]] std::size_t read_at(std::uint8_t device, std::size_t instant) const {
    std::size_t i = instant;
    while (i + 1 < size()) {
      const bool moves =
          is(i + 1, EventKind::alloc) || is(i + 1, EventKind::seed) || is(i + 1, EventKind::free);
      if (moves && events_[i + 1].device == device) break;
      ++i;
    }
    return i;
  }

  // Whether the event is an instant of the device.
  [[nodiscard]] bool concerns(std::uint8_t device, std::size_t i) const {
    return known_since(device) <= i && (events_[i].device == device || is(i, EventKind::step) ||
                                        is(i, EventKind::phase) || is(i, EventKind::snapshot));
  }

  [[nodiscard]] std::size_t known_since(std::uint8_t device) const {
    for (std::size_t i = 0; i < size(); ++i) {
      if (events_[i].device == device && (is(i, EventKind::alloc) || is(i, EventKind::oom))) {
        return i;
      }
    }
    return size();
  }

  // The first of the instants of a device with the highest bytes among the ones `wanted` selects.
  template <typename Wanted>
  [[nodiscard]] std::optional<std::size_t> highest(std::uint8_t device, Wanted wanted) const {
    std::optional<std::size_t> best;
    for (std::size_t i = 0; i < size(); ++i) {
      if (!concerns(device, i) || !wanted(i)) continue;
      if (!best || bytes(device, i) > bytes(device, *best)) best = i;
    }
    return best;
  }

  [[nodiscard]] bool is(std::size_t i, EventKind kind) const {
    return static_cast<EventKind>(events_[i].kind) == kind;
  }

 private:
  struct Life {
    std::uint8_t device = 0;
    std::int64_t size = 0;
    std::size_t birth = 0;
    std::size_t death = 0;  // the file's size if it is alive at the end
    std::map<std::size_t, std::uint8_t> category_since;

    [[nodiscard]] bool covers(std::size_t instant) const {
      return birth <= instant && instant < death;
    }
  };

  void follow(std::size_t birth) {
    const Event& event = events_[birth];
    Life life{.device = static_cast<std::uint8_t>(event.device),
              .size = static_cast<std::int64_t>(event.size),
              .birth = birth,
              .death = size(),
              .category_since = {{birth, static_cast<std::uint8_t>(event.category)}}};
    for (std::size_t i = birth + 1; i < size(); ++i) {
      if (events_[i].device != event.device || events_[i].address != event.address) continue;
      if (is(i, EventKind::retag)) {
        life.category_since[i] = static_cast<std::uint8_t>(events_[i].category);
      } else if (is(i, EventKind::free) || is(i, EventKind::alloc)) {
        life.death = i;
        break;
      }
    }
    lives_.push_back(life);
  }

  [[nodiscard]] std::uint8_t settled(const Life& life, std::size_t instant) const {
    const auto tagged =
        static_cast<Category>(std::prev(life.category_since.upper_bound(instant))->second);
    const bool dead = life.death < size();
    // Events strictly inside the life.
    const auto saw = [&](auto test) {
      for (std::size_t i = life.birth + 1; i < life.death; ++i) {
        if (test(i)) return true;
      }
      return false;
    };
    if (tagged == Category::forward_undecided) {
      bool captured = false;
      for (const auto& [since, category] : life.category_since) {
        captured |= category == static_cast<std::uint8_t>(Category::activation_hooks_shared) ||
                    category == static_cast<std::uint8_t>(Category::activation_hooks_opacus_only);
      }
      const bool oom = saw([&](std::size_t i) { return is(i, EventKind::oom); });
      if (dead && !captured && !oom &&
          static_cast<Phase>(events_[life.death].phase) == Phase::forward &&
          events_[life.death].step == events_[life.birth].step) {
        return static_cast<std::uint8_t>(Category::forward_temporaries);
      }
      if (!dead && file_.header.dropped > 0 && !captured &&
          events_.back().step == events_[life.birth].step) {
        return static_cast<std::uint8_t>(Category::forward_undecided);
      }
      return static_cast<std::uint8_t>(Category::activations);
    }
    const bool backward = tagged == Category::backward_temporaries;
    const bool temporary = backward || tagged == Category::optimizer_temporaries;
    const auto passing = [](Category category) {
      return category == Category::backward_temporaries ||
             category == Category::optimizer_temporaries || category == Category::temp_matrices ||
             category == Category::clipping_temporaries || category == Category::unattributed;
    };
    const auto held = [](Category category) {
      return category == Category::activation_hooks_shared ||
             category == Category::activation_hooks_opacus_only ||
             category == Category::forward_undecided;
    };
    if (passing(tagged) && life.category_since.size() > 1) {
      const auto first = static_cast<Category>(life.category_since.begin()->second);
      const auto second = static_cast<Category>(std::next(life.category_since.begin())->second);
      if (passing(first) && !passing(second) && !held(second)) {
        return static_cast<std::uint8_t>(second);
      }
    }
    if (temporary && life.category_since.size() == 1) {
      // An allocation that failed ends the block's normal course, even where its phase ends later.
      if (saw([&](std::size_t i) { return is(i, EventKind::oom); })) {
        return static_cast<std::uint8_t>(tagged);
      }
      const bool outlived = saw([&](std::size_t i) {
        const auto phase = static_cast<Phase>(events_[i].phase);
        const bool own = backward ? phase == Phase::backward || phase == Phase::second_backward
                                  : phase == Phase::optimizer_step;
        return is(i, EventKind::step) || (is(i, EventKind::phase) && !own);
      });
      // Autograd's own threads enter no phase; what they free outside of backward is the
      // backward's.
      bool dropped = backward && dead && is(life.death, EventKind::free) &&
                     static_cast<Phase>(events_[life.death].phase) == Phase::idle;
      for (std::size_t i = 0; dropped && i < life.death; ++i) {
        dropped = !is(i, EventKind::phase) || events_[i].thread != events_[life.death].thread;
      }
      if (dropped) return static_cast<std::uint8_t>(tagged);
      const bool in_order = file_.header.closed != 0 && file_.header.dropped == 0;
      if (outlived || (!dead && in_order)) {
        return static_cast<std::uint8_t>(Category::unattributed);
      }
    }
    return static_cast<std::uint8_t>(tagged);
  }

  const EventFileBuilder& file_;
  const std::vector<Event>& events_;
  std::vector<Life> lives_;
};

EventFileBuilder random_file(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](unsigned n) { return static_cast<unsigned>(random() % n); };
  const auto category = [&] {
    static constexpr Category kLikely[] = {Category::forward_undecided,
                                           Category::forward_undecided,
                                           Category::backward_temporaries,
                                           Category::backward_temporaries,
                                           Category::optimizer_temporaries,
                                           Category::temp_matrices,
                                           Category::clipping_temporaries,
                                           Category::activation_hooks_shared,
                                           Category::gradients,
                                           static_cast<Category>(40)};
    return kLikely[below(8)];
  };
  EventFileBuilder file;
  file.header.dropped = below(3) == 0 ? 9 : 0;
  file.header.closed = below(3) == 0 ? 0 : 1;
  struct Live {
    std::uint8_t device;
    std::uint64_t address;
    Category category;
    bool of_forward;
  };
  std::vector<Live> live;
  std::uint32_t step = 0;
  while (file.events.size() < kEvents) {
    const auto phase = static_cast<Phase>(below(kPhases));
    EventSpec spec{.phase = phase,
                   .step = step,
                   .module = static_cast<std::uint16_t>(below(4)),
                   .thread = static_cast<std::uint8_t>(below(3))};
    const unsigned choice = below(20);
    if (choice < 9) {
      spec.kind = EventKind::alloc;
      spec.device = static_cast<std::uint8_t>(below(2));
      spec.address = 64 * (1 + below(40));
      spec.size = below(10) == 0 ? 0 : below(1000);
      spec.category = category();
      std::erase_if(live, [&](const Live& one) {
        return one.device == spec.device && one.address == spec.address;
      });
      live.push_back({spec.device, spec.address, spec.category,
                      spec.category == Category::forward_undecided ||
                          spec.category == Category::activation_hooks_shared});
    } else if (choice < 17) {
      if (live.empty()) continue;
      const std::size_t which = below(static_cast<unsigned>(live.size()));
      spec.device = live[which].device;
      spec.address = live[which].address;
      if (choice < 14) {
        spec.kind = EventKind::free;
        spec.category = live[which].category;
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(which));
      } else {
        spec.kind = EventKind::retag;
        spec.op = static_cast<std::uint16_t>(live[which].category);
        // Only what was born in forward goes back to being undecided.
        do {
          spec.category = category();
        } while (spec.category == Category::forward_undecided && !live[which].of_forward);
        live[which].category = spec.category;
      }
    } else {
      static constexpr EventKind kMarks[] = {EventKind::phase, EventKind::snapshot, EventKind::step,
                                             EventKind::oom};
      spec.kind = kMarks[choice == 17 ? 0 : below(below(4) == 0 ? 4 : 3)];
      if (spec.kind == EventKind::step) spec.step = ++step;
      if (spec.kind == EventKind::phase) spec.thread = static_cast<std::uint8_t>(below(2));
      spec.device = spec.kind == EventKind::oom ? static_cast<std::uint8_t>(below(2)) : 0;
    }
    file.add(spec);
  }
  return file;
}

class ReplayModel : public ::testing::TestWithParam<unsigned> {};

TEST_P(ReplayModel, agrees) {
  const EventFileBuilder file = random_file(GetParam());
  const Model model(file);
  constexpr std::size_t kPoints = 25;
  const ReplayResult result = replay(file.write(), {.timeline_points = kPoints});
  EXPECT_EQ(result.contradictions.category_mismatches, 0U);
  EXPECT_EQ(result.contradictions.unknown_frees, 0U);

  const auto expect = [&](std::uint8_t device, const ReplayResult::Moment& moment,
                          std::optional<std::size_t> instant, bool exact, const std::string& what) {
    SCOPED_TRACE(what);
    ASSERT_TRUE(instant.has_value());
    EXPECT_EQ(moment.event, *instant);
    EXPECT_EQ(moment.bytes, model.bytes(device, *instant));
    EXPECT_EQ(moment.step, file.events[*instant].step);
    EXPECT_EQ(moment.phase, file.events[*instant].phase);
    const std::size_t read = exact ? *instant : model.read_at(device, *instant);
    EXPECT_EQ(without_zeros(moment.categories), model.categories(device, read));
  };

  for (const auto& device : result.devices) {
    SCOPED_TRACE("device " + std::to_string(device.id));
    const auto any = model.highest(device.id, [](std::size_t) { return true; });
    expect(device.id, device.peak, any, false, "peak");

    CategoryBytes modules{};
    CategoryBytes phases{};
    for (const auto& module : device.modules) {
      for (std::size_t id = 0; id < modules.size(); ++id) modules[id] += module.categories[id];
    }
    for (const auto& born : device.born_in) {
      for (std::size_t id = 0; id < phases.size(); ++id) phases[id] += born[id];
    }
    EXPECT_EQ(modules, device.peak.categories);
    EXPECT_EQ(phases, device.peak.categories);

    for (std::size_t phase = 0; phase < kPhases; ++phase) {
      const auto instant =
          model.highest(device.id, [&](std::size_t i) { return file.events[i].phase == phase; });
      if (!instant) {
        EXPECT_EQ(device.phases[phase].event, ReplayResult::kNever);
      } else {
        expect(device.id, device.phases[phase], instant, false, "phase " + std::to_string(phase));
      }
    }
    for (const auto& step : device.steps) {
      const auto instant = model.highest(
          device.id, [&](std::size_t i) { return file.events[i].step == step.number; });
      expect(device.id, step.peak, instant, false, "step " + std::to_string(step.number));
      std::size_t last = 0;  // of this step's events
      for (std::size_t i = 0; i < model.size(); ++i) {
        if (file.events[i].step == step.number) last = i;
      }
      EXPECT_EQ(step.end_bytes, model.bytes(device.id, last));
      EXPECT_EQ(step.complete, last + 1 < model.size());
    }
    std::size_t rows = 0;
    for (std::size_t begin = 0; begin < model.size(); begin += kEvents / kPoints) {
      const auto instant = model.highest(
          device.id, [&](std::size_t i) { return begin <= i && i < begin + kEvents / kPoints; });
      if (!instant) continue;
      ASSERT_LT(rows, device.timeline.size());
      expect(device.id, device.timeline[rows++], instant, false, "row");
    }
    EXPECT_EQ(rows, device.timeline.size());
    std::size_t snapshots = 0;
    std::size_t ooms = 0;
    for (std::size_t i = 0; i < model.size(); ++i) {
      if (!model.concerns(device.id, i)) continue;
      if (model.is(i, EventKind::snapshot)) {
        ASSERT_LT(snapshots, device.snapshots.size());
        expect(device.id, device.snapshots[snapshots++], i, true, "snapshot");
      } else if (model.is(i, EventKind::oom)) {
        ASSERT_LT(ooms, device.out_of_memory.size());
        expect(device.id, device.out_of_memory[ooms++], i, true, "oom");
      }
    }
    EXPECT_EQ(snapshots, device.snapshots.size());
    EXPECT_EQ(ooms, device.out_of_memory.size());
    EXPECT_EQ(device.end_bytes, model.bytes(device.id, model.size() - 1));
  }
}

INSTANTIATE_TEST_SUITE_P(Random, ReplayModel, ::testing::Range(0U, 60U));

}  // namespace
}  // namespace opacus_memprof
