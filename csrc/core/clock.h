// SPDX-License-Identifier: Apache-2.0
// The clock of events: the time-stamp counter if it ticks evenly, otherwise CLOCK_MONOTONIC.
// Reading the counter costs a third of clock_gettime, which matters for every allocation and free.
// FileHeader contains the two readings that convert ticks to nanoseconds.
//
// The wall clock is read once, when a profile begins. Later times are that reading plus the
// progress of CLOCK_MONOTONIC. Setting the clock meanwhile does not affect durations.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace opacus_memprof {

// The sources of times; tests replace the system's.
struct Clocks {
  std::uint64_t (*monotonic_ns)() noexcept;
  std::uint64_t (*wall_ns)() noexcept;  // since 1970
  bool counter;                         // whether the processor's time-stamp counter ticks evenly
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

// Nanoseconds since 1970 according to set_wall_clock; later changes of the wall clock are ignored.
std::uint64_t unix_ns() noexcept;

// Synchronizes unix_ns() with the wall clock. Called when a profile begins.
void set_wall_clock() noexcept;

// For tests: replaces the clocks and returns the previous ones. Sets unix_ns() from the new ones.
Clocks replace_clocks(const Clocks& clocks) noexcept;

}  // namespace opacus_memprof
