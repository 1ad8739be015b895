// SPDX-License-Identifier: Apache-2.0
// What is known about the bytes of device memory, by address.
//
// Memory without an entry is unwritten: it was allocated, and no operator has written it. It reads
// as zero. A block that is allocated again still holds its old bytes, so a reader fills it with
// zeros first. The results of an operator that was not executed are a repeated, assumed zero.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

namespace opacus_memprof::virtual_values {

// In ascending order: a result has the lowest state of its inputs.
enum class State : std::uint8_t {
  unwritten,  // reads as zero
  assumed,    // the bytes are there, but derived from some that were not computed
  alike,      // the bytes are what a real GPU would hold if every rank had this rank's data
  known,      // the bytes are what a real GPU would hold
};

// Returns whether the bytes were computed. Otherwise they are assumed zeros.
inline bool is_computed(State state) noexcept { return state >= State::alike; }

struct Span {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;

  [[nodiscard]] std::size_t size() const noexcept { return end - begin; }
};

inline std::uint8_t* bytes_at(std::uintptr_t address) {
  return reinterpret_cast<std::uint8_t*>(address);  // NOLINT(performance-no-int-to-ptr)
}

// One element that a range repeats, if the range is too large to write.
struct Pattern {
  std::array<std::uint8_t, 16> bytes{};  // the byte at address a is bytes[a % size]
  std::uint8_t size = 0;

  bool operator==(const Pattern&) const = default;
};

struct Uniform {
  State state = State::unwritten;
  Pattern pattern;
};

// Thread safe. The lock is a leaf: it is taken while torch's allocator holds its own.
class Ranges {
 public:
  // Makes the range unwritten.
  void reset(Span span);
  // Makes the range read as zero, because the values written there were not computed.
  void set_not_computed(Span span);
  void set(Span span, State state);
  void set_uniform(Span span, Uniform uniform);

  // Writes the zeros and patterns of the range into memory. Returns the lowest state in it, where
  // unwritten bytes count as `assumed`, since they are written now.
  State materialize(Span span);

  // Returns the lowest state in the range, and writes nothing.
  [[nodiscard]] State lowest(Span span) const;

  // Returns the lowest state of every `size` bytes of the range.
  [[nodiscard]] std::vector<State> each(Span span, std::size_t size) const;

  // Returns the element that the whole range repeats: a pattern, or zeros if all of it is
  // unwritten. Returns nothing if the range has bytes of its own.
  [[nodiscard]] std::optional<Uniform> uniform(Span span) const;

 private:
  struct Entry {
    std::uintptr_t end = 0;
    State state = State::unwritten;
    Pattern pattern;  // size 0: the bytes are there

    [[nodiscard]] bool same(const Entry& other) const noexcept {
      return state == other.state && pattern == other.pattern;
    }
  };
  using Entries = std::map<std::uintptr_t, Entry>;

  void split(std::uintptr_t at);
  void put(Span span, Entry entry);

  mutable std::mutex mutex_;
  Entries entries_;  // by start; they do not overlap
};

}  // namespace opacus_memprof::virtual_values
