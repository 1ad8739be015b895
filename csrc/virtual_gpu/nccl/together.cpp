// SPDX-License-Identifier: Apache-2.0
#include "virtual_gpu/nccl/together.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "virtual_gpu/machine/limits.h"
#include "virtual_gpu/machine/observer.h"
#include "virtual_gpu/nccl/reductions.h"

namespace opacus_memprof::virtual_gpu {
namespace {

using Ranks = std::vector<std::deque<Part>>;

// Calls that wait for those of other ranks, by the clique.
struct Waiting {
  std::mutex mutex;
  std::map<std::uint64_t, Ranks> cliques;
};

Waiting& waiting() {
  static auto* const only = new Waiting;
  return *only;
}

// What one rank gets in one place. Its bytes are computed before any are written, because results
// may lie where the data was.
struct Result {
  void* to;
  std::size_t size;
  int state;
  std::vector<char> bytes;  // none where they are too many
};

class Run {
 public:
  explicit Run(const std::vector<Part>& parts) : parts_(parts), first_(parts.front()) {
    size_ = first_.count > kSmall ? kSmall + 1 : first_.count * element_size(first_.type);
  }

  void execute() {
    for (std::size_t rank = 0; rank < parts_.size(); ++rank) compute(rank);
    for (const Result& result : results_) {
      outside_.written(result.to, result.size, result.state);
      if (!result.bytes.empty()) std::memcpy(result.to, result.bytes.data(), result.bytes.size());
    }
  }

 private:
  void compute(std::size_t rank) {
    const auto root = static_cast<std::size_t>(first_.root);
    auto* const to = static_cast<char*>(parts_[rank].to);
    switch (first_.collective) {
      case Collective::all_reduce:
        return add(to, sources(0));
      case Collective::reduce_scatter:
        return add(to, sources(rank * size_));
      case Collective::reduce:
        if (rank == root) add(to, sources(0));
        return;
      case Collective::broadcast:
        if (to != parts_[root].from) add(to, {parts_[root].from});
        return;
      case Collective::all_gather:
        for (std::size_t other = 0; other < parts_.size(); ++other)
          add(to + other * size_, {parts_[other].from});
    }
  }

  [[nodiscard]] std::vector<const void*> sources(std::size_t offset) const {
    std::vector<const void*> found;
    for (const Part& part : parts_) found.push_back(static_cast<const char*>(part.from) + offset);
    return found;
  }

  void add(void* to, const std::vector<const void*>& from) {
    Result result{to, size_, 0, {}};
    std::vector<int> states;
    for (const void* const source : from) states.push_back(outside_.read(source, size_));
    result.state = *std::min_element(states.begin(), states.end());
    if (size_ <= kSmall) {
      result.bytes.resize(size_);
      std::memcpy(result.bytes.data(), from.front(), size_);
      for (std::size_t other = 1; other < from.size(); ++other)
        combine(result.bytes.data(), from[other], first_.count, first_.type, first_.operation);
      finish(result.bytes.data(), first_.count, first_.type, first_.operation,
             static_cast<int>(from.size()));
    }
    results_.push_back(std::move(result));
  }

  const std::vector<Part>& parts_;
  const Part& first_;
  std::size_t size_;
  Outside outside_;
  std::vector<Result> results_;
};

}  // namespace

bool together(const Communicator& communicator, const Part& part) {
  if (communicator.clique == 0) return false;
  std::vector<Part> parts;
  {
    const std::lock_guard lock(waiting().mutex);
    Ranks& ranks = waiting().cliques[communicator.clique];
    ranks.resize(static_cast<std::size_t>(communicator.ranks));
    ranks[static_cast<std::size_t>(communicator.rank)].push_back(part);
    if (std::any_of(ranks.begin(), ranks.end(), [](const auto& calls) { return calls.empty(); }))
      return true;
    for (auto& calls : ranks) {
      parts.push_back(calls.front());
      calls.pop_front();
    }
  }
  Run(parts).execute();
  return true;
}

}  // namespace opacus_memprof::virtual_gpu
