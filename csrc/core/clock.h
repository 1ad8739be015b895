// SPDX-License-Identifier: Apache-2.0
// The clock of events: the time-stamp counter where it ticks evenly (reading it costs a third of
// what clock_gettime costs, and every allocation and free pays it), else CLOCK_MONOTONIC.
// FileHeader carries the two readings that convert ticks to nanoseconds.
//
// The wall clock is read once, when a profile begins: a later time is that reading and what
// CLOCK_MONOTONIC has gone on since. Somebody who sets the clock changes no duration.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace opacus_memprof {

// Where times come from; tests put others in the place of the system's.
struct Clocks {
  std::uint64_t (*monotonic_ns)() noexcept;
  std::uint64_t (*wall_ns)() noexcept;  // since 1970
  bool counter;                         // the processor's time-stamp counter ticks evenly
};

namespace detail {
extern Clocks clocks;
}

inline std::uint64_t ticks() noexcept {
#if defined(__x86_64__)
  if (detail::clocks.counter) [[likely]]
    return __rdtsc();
#endif
  return detail::clocks.monotonic_ns();
}

// Nanoseconds since 1970, as the wall clock would tell had nobody set it since set_wall_clock.
std::uint64_t unix_ns() noexcept;

// From now on unix_ns() goes on from what the wall clock says. It is called as a profile begins.
void set_wall_clock() noexcept;

// For tests: returns the clocks that were there before. Sets unix_ns() by the new ones.
Clocks replace_clocks(const Clocks& clocks) noexcept;

}  // namespace opacus_memprof
