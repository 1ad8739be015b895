// SPDX-License-Identifier: Apache-2.0
#include "core/failures.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace opacus_memprof {

std::vector<Holding> holdings_of(const std::vector<Block>& blocks, Device device) {
  using Origin =
      std::tuple<std::uint8_t, std::uint8_t, std::uint16_t, std::uint16_t, std::uint32_t>;
  std::map<Origin, Holding> found;
  for (const Block& block : blocks) {
    if (block.device != device) continue;
    const auto phase = static_cast<std::uint8_t>(block.phase);
    Holding& holding = found[{block.category(), phase, block.module, block.op, block.step}];
    holding.bytes += block.size();
    ++holding.blocks;
    holding.largest = std::max(holding.largest, block.size());
    holding.step = block.step;
    holding.module = block.module;
    holding.op = block.op;
    holding.category = block.category();
    holding.phase = phase;
  }
  std::vector<Holding> result;
  result.reserve(found.size());
  for (const auto& [origin, holding] : found) result.push_back(holding);
  std::stable_sort(result.begin(), result.end(),
                   [](const Holding& a, const Holding& b) { return a.bytes > b.bytes; });
  return result;
}

std::uint64_t FailureLog::add(std::list<Failure>& failure) noexcept {
  const std::uint64_t number = total_++;
  if (failure.empty()) return number;
  failure.front().number = number;
  newest_.splice(newest_.end(), failure);
  if (newest_.size() > kMaxFailures) failure.splice(failure.begin(), newest_, newest_.begin());
  return number;
}

void FailureLog::set_upstream(std::uint64_t number, const UpstreamAtFailure& upstream) noexcept {
  for (Failure& failure : newest_) {
    if (failure.number == number) failure.upstream = upstream;
  }
}

std::list<Failure> FailureLog::clear() noexcept {
  total_ = 0;
  return std::exchange(newest_, {});
}

}  // namespace opacus_memprof
