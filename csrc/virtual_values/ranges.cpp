// SPDX-License-Identifier: Apache-2.0
#include "virtual_values/ranges.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace opacus_memprof::virtual_values {
namespace {

// Copies what is written already, so that each copy is twice as long as the one before.
void fill(Span span, const Pattern& pattern) {
  std::uint8_t* const bytes = bytes_at(span.begin);
  std::size_t written = std::min<std::size_t>(pattern.size, span.size());
  for (std::size_t index = 0; index < written; ++index) {
    bytes[index] = pattern.bytes[(span.begin + index) % pattern.size];
  }
  while (written < span.size()) {
    const std::size_t next = std::min(written, span.size() - written);
    std::memcpy(bytes + written, bytes, next);  // whole periods come before
    written += next;
  }
}

}  // namespace

// Afterwards no entry reaches over `at`.
void Ranges::split(std::uintptr_t at) {
  const auto after = entries_.lower_bound(at);
  if (after == entries_.begin()) return;
  auto& [start, entry] = *std::prev(after);
  if (entry.end <= at) return;
  Entry rest = entry;
  entry.end = at;
  entries_.emplace_hint(after, at, rest);
}

void Ranges::put(Span span, Entry entry) {
  if (span.size() == 0) return;
  const auto next = entries_.upper_bound(span.begin);
  if (next != entries_.begin()) {  // a column of a known matrix, written again piece by piece
    const Entry& around = std::prev(next)->second;
    if (around.end >= span.end && around.same(entry)) return;
  }
  split(span.begin);
  split(span.end);
  auto after = entries_.erase(entries_.lower_bound(span.begin), entries_.lower_bound(span.end));
  if (entry.state == State::unwritten) return;
  entry.end = span.end;
  // Neighbours that say the same become one, so that a buffer written piece by piece is one entry.
  if (after != entries_.end() && after->first == span.end && after->second.same(entry)) {
    entry.end = after->second.end;
    after = entries_.erase(after);
  }
  if (after != entries_.begin()) {
    auto& [start, before] = *std::prev(after);
    if (before.end == span.begin && before.same(entry)) {
      before.end = entry.end;
      return;
    }
  }
  entries_.emplace_hint(after, span.begin, entry);
}

void Ranges::reset(Span span) {
  const std::lock_guard lock(mutex_);
  put(span, {});
}

void Ranges::set(Span span, State state) {
  const std::lock_guard lock(mutex_);
  put(span, {.end = span.end, .state = state, .pattern = {}});
}

void Ranges::set_uniform(Span span, Uniform uniform) {
  const std::lock_guard lock(mutex_);
  put(span, {.end = span.end, .state = uniform.state, .pattern = uniform.pattern});
}

void Ranges::set_not_computed(Span span) {
  set_uniform(span, {State::assumed, {.bytes = {}, .size = 1}});
}

State Ranges::materialize(Span span) {
  if (span.size() == 0) return State::known;
  const std::lock_guard lock(mutex_);
  auto found = entries_.upper_bound(span.begin);
  if (found != entries_.begin()) --found;
  if (found != entries_.end() && found->first <= span.begin && found->second.end >= span.end &&
      found->second.pattern.size == 0) {
    return found->second.state;
  }
  split(span.begin);
  split(span.end);
  State lowest = State::known;
  std::uintptr_t at = span.begin;
  while (at < span.end) {
    // The entry of the last round may have been merged with the next one.
    auto entry = entries_.upper_bound(at);
    const std::uintptr_t next =
        entry == entries_.end() ? span.end : std::min(entry->first, span.end);
    if (entry == entries_.begin() || (--entry)->second.end <= at) {
      std::memset(bytes_at(at), 0, next - at);
      put({at, next}, {.end = next, .state = State::assumed, .pattern = {}});
      lowest = State::assumed;
      at = next;
      continue;
    }
    const Entry copy = entry->second;
    lowest = std::min(lowest, copy.state);
    const std::uintptr_t end = std::min(copy.end, span.end);
    if (copy.pattern.size != 0) {
      fill({at, end}, copy.pattern);
      put({at, end}, {.end = end, .state = copy.state, .pattern = {}});
    }
    at = end;
  }
  return lowest;
}

State Ranges::lowest(Span span) const {
  const std::lock_guard lock(mutex_);
  auto found = entries_.upper_bound(span.begin);
  if (found != entries_.begin()) --found;
  State lowest = State::known;
  std::uintptr_t at = span.begin;
  for (; at < span.end; ++found) {
    if (found == entries_.end()) return State::unwritten;
    if (found->second.end <= at) continue;  // the one before the range
    if (found->first > at) return State::unwritten;
    lowest = std::min(lowest, found->second.state);
    at = found->second.end;
  }
  return lowest;
}

std::vector<State> Ranges::each(Span span, std::size_t size) const {
  std::vector<State> states(span.size() / size, State::known);
  const auto lower = [&](std::uintptr_t begin, std::uintptr_t end, State state) {
    if (begin == end) return;
    for (std::size_t index = (begin - span.begin) / size; span.begin + index * size < end; ++index)
      states[index] = std::min(states[index], state);
  };
  const std::lock_guard lock(mutex_);
  auto found = entries_.upper_bound(span.begin);
  if (found != entries_.begin()) --found;
  std::uintptr_t at = span.begin;
  for (; at < span.end && found != entries_.end() && found->first < span.end; ++found) {
    if (found->second.end <= at) continue;  // the one before the range
    const std::uintptr_t begin = std::max(at, found->first);
    lower(at, begin, State::unwritten);
    at = std::min(found->second.end, span.end);
    lower(begin, at, found->second.state);
  }
  lower(at, span.end, State::unwritten);
  return states;
}

std::optional<Uniform> Ranges::uniform(Span span) const {
  const std::lock_guard lock(mutex_);
  auto found = entries_.upper_bound(span.begin);
  if (found != entries_.begin()) {
    const Entry& before = std::prev(found)->second;
    if (before.end >= span.end && before.pattern.size != 0) {
      return Uniform{before.state, before.pattern};
    }
    if (before.end > span.begin) return std::nullopt;
  }
  if (found != entries_.end() && found->first < span.end) return std::nullopt;
  return Uniform{State::unwritten, {.bytes = {}, .size = 1}};
}

}  // namespace opacus_memprof::virtual_values
