// SPDX-License-Identifier: Apache-2.0
// The numbers of blocks in a replay. Without gaps a block's number is the number of blocks born
// before it. A block that was born in a gap and lives after it gets the next number of the replay,
// although it had another number in the run.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace opacus_memprof {

class Births {
 public:
  // Registers the birth of a block and returns its number.
  std::uint64_t add() { return add(next_); }
  // Registers a block that had this number in the run. Numbers increase.
  std::uint64_t add(std::uint64_t in_run) {
    if (in_run != next_) runs_.push_back({.number = count_, .in_run = in_run});
    next_ = in_run + 1;
    return count_++;
  }
  // Sets the number that the next block has in the run.
  void resume(std::uint64_t in_run) {
    if (in_run == next_) return;
    runs_.push_back({.number = count_, .in_run = in_run});
    next_ = in_run;
  }

  [[nodiscard]] std::uint64_t count() const { return count_; }
  // The number that the next block has in the run.
  [[nodiscard]] std::uint64_t next() const { return next_; }

  // Returns the number in the run of the block with this number, or of the next one.
  [[nodiscard]] std::uint64_t in_run(std::uint64_t number) const {
    const auto after =
        std::upper_bound(runs_.begin(), runs_.end(), number,
                         [](std::uint64_t value, const Run& run) { return value < run.number; });
    return (after - 1)->in_run + number - (after - 1)->number;
  }

  // Returns how many blocks have smaller numbers in the run than this.
  [[nodiscard]] std::uint64_t before(std::uint64_t in_run) const {
    const auto after =
        std::upper_bound(runs_.begin(), runs_.end(), in_run,
                         [](std::uint64_t value, const Run& run) { return value < run.in_run; });
    const std::uint64_t end = after == runs_.end() ? count_ : after->number;
    return std::min((after - 1)->number + in_run - (after - 1)->in_run, end);
  }

 private:
  struct Run {  // consecutive numbers
    std::uint64_t number;
    std::uint64_t in_run;
  };
  std::vector<Run> runs_{{0, 0}};
  std::uint64_t count_ = 0;
  std::uint64_t next_ = 0;  // in the run
};

}  // namespace opacus_memprof
