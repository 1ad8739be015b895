// SPDX-License-Identifier: Apache-2.0
#include "core/clock.h"

#include <atomic>
#include <ctime>
#include <utility>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace opacus_memprof {

namespace {

std::uint64_t read(clockid_t clock) noexcept {
  timespec time{};
  ::clock_gettime(clock, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000U +
         static_cast<std::uint64_t>(time.tv_nsec);
}

// Invariant: the counter ticks at one rate in every state of the processor, and on all cores.
bool has_invariant_counter() noexcept {
#if defined(__x86_64__)
  constexpr unsigned kPowerManagement = 0x80000007;
  constexpr unsigned kInvariant = 1U << 8U;
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid(kPowerManagement, &a, &b, &c, &d) != 0 && (d & kInvariant) != 0;
#else
  return false;
#endif
}

// Wall clock minus monotonic clock at the last reading.
constinit std::atomic<std::uint64_t> wall_offset{0};

}  // namespace

namespace detail {
constinit Clocks clocks{[]() noexcept { return read(CLOCK_MONOTONIC); },
                        []() noexcept { return read(CLOCK_REALTIME); }, false};
}

[[maybe_unused]] static const Clocks clocks_at_load =
    replace_clocks({detail::clocks.monotonic_ns, detail::clocks.wall_ns, has_invariant_counter()});

std::uint64_t unix_ns() noexcept {
  return wall_offset.load(std::memory_order_relaxed) + detail::clocks.monotonic_ns();
}

void set_wall_clock() noexcept {
  wall_offset = detail::clocks.wall_ns() - detail::clocks.monotonic_ns();
}

Clocks replace_clocks(const Clocks& clocks) noexcept {
  const Clocks before = std::exchange(detail::clocks, clocks);
  set_wall_clock();
  return before;
}

}  // namespace opacus_memprof
