// SPDX-License-Identifier: Apache-2.0
// One record of an event file, and the file's header. docs/format.md describes both for readers in
// other languages; change them together and raise kEventVersion.
#pragma once

#include <array>
#include <cstdint>

namespace opacus_memprof {

inline constexpr std::uint32_t kFormatVersion = 1;  // of the JSON files
inline constexpr std::uint32_t kEventVersion = 2;
inline constexpr std::uint32_t kWholeFileVersion = 1;  // without pieces; still readable
inline constexpr char kMagic[8] = {'O', 'M', 'E', 'M', 'P', 'R', 'O', 'F'};
inline constexpr std::uint64_t kHeaderBytes = 4096;  // records start on the second page

enum class EventKind : std::uint8_t {
  none,      // in version 1, an unwritten record: the end of the file of a killed process
  alloc,     // a block was handed out; the tag is its tag at birth
  free,      // a block was returned; category is its last one, phase and step are those of the free
  retag,     // a block changed category; `op` has the previous category
  step,      // a step ended; `step` is the new physical number, `size` the new logical one
  phase,     // a thread entered `phase`
  snapshot,  // session.snapshot(); `op` is the name's id in meta.json, `size` its number
  seed,      // a block that existed before the profiler
  oom,       // an allocation of `size` bytes failed under this tag
  settled,   // after a piece's end: the outcome of a block that was live then (replay_outcomes.h)
  gap,       // in no file: readers' rows for missing events, `size` of them
};

// 32 bytes, little endian. Bit-fields of one 64-bit word each, low bits first.
struct Event {
  std::uint64_t time : 48;  // clock ticks since the header's start_ticks
  std::uint64_t kind : 8;
  std::uint64_t category : 8;

  std::uint64_t address : 48;
  std::uint64_t phase : 8;
  std::uint64_t device : 8;  // 0 is the CPU, 1 + i is cuda:i

  std::uint64_t size : 48;   // bytes requested
  std::uint64_t stream : 8;  // index into meta.json's streams
  std::uint64_t thread : 8;  // index into meta.json's threads

  std::uint64_t module : 16;  // index into meta.json's modules; 0 is "no module"
  std::uint64_t op : 16;      // index into meta.json's ops; 0 is "no op"
  std::uint64_t step : 32;    // physical steps (calls of optimizer.step) before this event
};
static_assert(sizeof(Event) == 32);

// The same 32 bytes as they are written. They are composed in registers: filling bit-fields in
// memory and then copying them as words would stall on every event.
using EventWords = std::array<std::uint64_t, 4>;

constexpr std::uint64_t event_word(std::uint64_t low48, std::uint8_t sixth,
                                   std::uint8_t seventh) noexcept {
  constexpr std::uint64_t kLow48 = (std::uint64_t{1} << 48U) - 1;
  return (low48 & kLow48) | std::uint64_t{sixth} << 48U | std::uint64_t{seventh} << 56U;
}

// The state at the start of a piece that its own events do not contain.
struct Opening {
  std::uint64_t piece;        // its number, from 0 on
  std::uint64_t first_event;  // number of events before it
  std::uint64_t seeds;        // records of its live set, which come first
  std::uint64_t births;       // number of blocks that had been born
  std::uint64_t ticks;        // since the header's start_ticks
  std::uint64_t logical_step;
  // Number of blocks that had been born at the latest such event (OutcomeRules).
  std::uint64_t after_backward;
  std::uint64_t after_optimizer;
  std::uint64_t at_oom;
  std::array<std::uint64_t, 4> enters_phases;  // one bit per thread
};

// The seeds of a piece's live set have this instead of a time.
struct SeedState {
  std::uint64_t birth : 37;  // number of blocks born before this one
  std::uint64_t retagged : 1;
  std::uint64_t captured : 1;
  std::uint64_t seeded : 1;
  std::uint64_t outcome : 8;
};
constexpr SeedState seed_state(const Event& seed) noexcept {
  const std::uint64_t word = seed.time;
  return {.birth = word & ((std::uint64_t{1} << 37U) - 1),
          .retagged = word >> 37U & 1U,
          .captured = word >> 38U & 1U,
          .seeded = word >> 39U & 1U,
          .outcome = word >> 40U & 0xFFU};
}
constexpr std::uint64_t seed_word(const SeedState& state) noexcept {
  return std::uint64_t{state.birth} | std::uint64_t{state.retagged} << 37U |
         std::uint64_t{state.captured} << 38U | std::uint64_t{state.seeded} << 39U |
         std::uint64_t{state.outcome} << 40U;
}

// The first page of a piece. In the first piece the fields up to `closed` describe the run;
// `count`, `dropped` and the last clock reading are refreshed about two hundred times a second.
struct FileHeader {
  char magic[8];
  std::uint32_t version;
  std::uint32_t record_bytes;
  std::uint64_t count;     // events of the run; in version 1 records
  std::uint64_t dropped;   // lost events; in version 1 events after the last record
  std::uint64_t capacity;  // the limit: records in all pieces
  std::uint64_t pid;
  // Two instants, each read on both clocks: at the start, and last (refreshed while the process
  // lives). The line through them converts ticks to nanoseconds.
  std::uint64_t start_ticks;
  std::uint64_t start_unix_ns;
  std::uint64_t last_ticks;
  std::uint64_t last_unix_ns;
  std::uint64_t closed;  // 1 once the recorder has ended properly
  Opening opening;       // 0 in version 1
};
static_assert(sizeof(FileHeader) <= kHeaderBytes);

}  // namespace opacus_memprof
