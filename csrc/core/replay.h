// SPDX-License-Identifier: Apache-2.0
// The content of an event file: the live bytes of every device by category, at its peak and over
// time.
//
// For a run with gaps (docs/format.md, Pieces) the figures describe the existing parts. Each part
// begins with the live set, so that every instant in it is exact.
//
// The category of a block can depend on its later life, so the file is read twice: first to settle
// the blocks and to find the instants to report, then to add up the live memory at these. Settled
// means:
// - forward_undecided becomes forward_temporaries if the block was freed in the forward of its own
//   step, otherwise activations. A block that an activation hook captured, or that was live when an
//   allocation failed (unwinding frees in forward what backward would have freed), is an
//   activation. If the file ends early because it was full, a block of its last step stays
//   undecided.
// - backward_temporaries, optimizer_temporaries, temp_matrices, clipping_temporaries and
//   unattributed that are retagged get the category of their first retag from birth on: a gradient,
//   an optimizer state, a per-sample gradient, a clipped sum, a parameter of a model that was found
//   later. The first two become unattributed if they are never retagged and outlive their phase,
//   because then they are not temporaries. Outliving is detected at the next step event, at the
//   next event of a thread that enters another phase, or at the end of a file that ended properly.
//   Blocks that were live when an allocation failed keep their category. So do blocks that
//   autograd's own thread frees late: a thread that enters no phase, not in backward.
// - a block that no module's code allocated belongs from birth on to the first module that it is
//   given: the owner of the parameter whose state, sum or gradient it is.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/counters.h"
#include "core/event.h"
#include "core/event_walk.h"
#include "core/vocabulary.h"

namespace opacus_memprof {

struct ReplayOptions {
  std::size_t timeline_points = 2000;  // maximum number of rows in a device's timeline
};

struct ReplayResult {
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};

  // The state right after an event. `bytes` are the live requested bytes of one device.
  struct Instant {
    std::uint64_t event = kNever;
    std::int64_t time_ns = 0;  // since the file was started
    std::int64_t bytes = 0;
    std::uint32_t step = 0;  // physical and logical steps that had ended
    std::uint64_t logical_step = 0;
    std::uint8_t phase = 0;
  };

  // The sum of `categories` is `bytes`. For a maximum they are read when the device's next block is
  // allocated or freed: blocks that are retagged at the maximum count under their new category, as
  // in the live counters.
  struct Moment : Instant {
    CategoryBytes categories{};
  };

  struct Step {
    std::uint32_t number = 0;
    Moment peak;
    std::int64_t end_bytes = 0;
    bool complete = false;  // whether all of it was seen, and a step event ended it
  };

  struct Snapshot : Moment {
    std::uint16_t name = 0;  // id among the ops
    std::uint64_t number = 0;
  };

  struct OutOfMemory : Moment {
    std::uint64_t requested = 0;  // bytes of the failed request, and their tag
    std::uint8_t category = 0;
    std::uint16_t module = 0;
    std::uint16_t op = 0;
  };

  struct LiveBlock {
    std::uint64_t bytes = 0;
    std::uint8_t category = 0;
    std::uint8_t phase = 0;  // at birth, as op and step
    std::uint16_t module = 0;
    std::uint16_t op = 0;
    std::uint32_t step = 0;
  };

  // Bytes of one module, op, stream or thread.
  struct Share {
    std::uint16_t id = 0;
    CategoryBytes categories{};
  };

  // Blocks of one module, category and site (phase and op of birth) that are still live at the end
  // of the last step, and were born neither in the first kWarmUpSteps nor in the last kRecentSteps
  // steps. A run without growing memory has few: later steps free the blocks of earlier ones.
  struct Residue {
    std::uint16_t module = 0;
    std::uint8_t category = 0;
    std::uint8_t phase = 0;  // at birth, as op
    std::uint16_t op = 0;
    std::int64_t bytes = 0;
    std::uint64_t blocks = 0;
    std::uint64_t steps = 0;  // steps of their births: how many, the first and the last
    std::uint32_t first_step = 0;
    std::uint32_t last_step = 0;
  };

  struct Device {
    std::uint8_t id = 0;
    Moment peak;                                   // the first instant of the highest bytes
    std::vector<Share> modules;                    // at the peak, by id; likewise the next three
    std::vector<Share> ops;                        // of a block's birth
    std::vector<Share> streams;                    // likewise
    std::vector<Share> threads;                    // likewise
    std::array<CategoryBytes, kPhases> born_in{};  // at the peak, by the phase of birth
    std::vector<LiveBlock> largest_blocks;         // at the peak, at most 50
    std::vector<LiveBlock> newest_blocks;          // at the peak, at most 10, the last born first
    std::array<Moment, kPhases> phases;  // highest instant of each; event kNever: not seen
    std::vector<Step> steps;             // at most kMaxSteps
    std::uint64_t steps_left_out = 0;
    std::vector<Moment> timeline;     // the highest of each of `timeline_points` runs of events
    std::vector<Snapshot> snapshots;  // at most kMaxSnapshots
    std::vector<OutOfMemory> out_of_memory;
    Moment last_step_end;          // event kNever: no step ended
    std::vector<Residue> residue;  // at that instant, by module, category, phase and op
    std::int64_t end_bytes = 0;
  };

  static constexpr std::uint32_t kWarmUpSteps = 2;  // optimizer states, workspaces, caches
  static constexpr std::uint32_t kRecentSteps = 2;  // blocks that the next step may still replace

  // Of both: the first and the last, and the highest of the others.
  static constexpr std::size_t kMaxSteps = 600;
  static constexpr std::size_t kMaxSnapshots = 600;

  // Events that are in no file: removed from a long run, or lost.
  struct Gap {
    std::uint64_t first_event = 0;  // number of events before it
    std::uint64_t events = 0;       // number of missing events
    std::int64_t time_ns = 0;       // of the last event before, since the file was started
    std::int64_t end_ns = 0;        // of its end
    std::uint32_t step = 0;         // physical steps that had ended before
    std::uint32_t end_step = 0;     // and at its end, as far as known
  };

  FileHeader header{};
  std::uint64_t events = 0;                     // number of events that were read
  std::size_t categories = kBuiltinCategories;  // beyond these ids every figure is 0
  Contradictions contradictions;
  std::vector<Device> devices;  // devices that had a block or ran out of memory, by id
  std::vector<Gap> gaps;        // in order
};

// Throws std::runtime_error with one sentence if `events_path` is not a readable event file.
ReplayResult replay(const std::string& events_path, ReplayOptions options = {});

}  // namespace opacus_memprof
