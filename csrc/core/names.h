// SPDX-License-Identifier: Apache-2.0
// Interned names: a name's id is its index in the list of its kind. Thread safe.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/spin_lock.h"

namespace opacus_memprof {

class Names {
 public:
  enum class Kind : std::uint8_t { category, module, op, thread, stream };
  static constexpr std::size_t kKinds = 5;

  Names();

  // Returns the id of `name`, which is added if it is new; invalid UTF-8 is replaced. If a list is
  // full, its last id is returned and named "(other)": no bytes are lost, only their names merge.
  std::uint16_t intern(Kind kind, std::string_view name);

  // Does what intern does, but throws std::out_of_range with one sentence if `intern` would merge
  // names.
  std::uint16_t intern_or_throw(Kind kind, std::string_view name);

  // Sets the component of a module for reports, "attention" or "mlp". It comes from the module's
  // class, because names do not tell. "" removes it.
  void set_component(std::uint16_t module, std::string_view component);
  // The component of each module by its id; "" if none was set.
  [[nodiscard]] std::vector<std::string> components() const;

  // Returns the id of the op that stands for `stack`, lines of the program's code, of which `line`
  // is the innermost. Lines may take half of the ids; returns 0 beyond that.
  std::uint16_t intern_line(std::string_view stack, std::string_view line);
  // The line of each op by its id; "" if it is another op.
  [[nodiscard]] std::vector<std::string> lines() const;

  [[nodiscard]] std::vector<std::string> list(Kind kind) const;
  [[nodiscard]] std::string name(Kind kind, std::size_t id) const;  // of an id that exists
  [[nodiscard]] std::size_t size(Kind kind) const noexcept;         // ids are smaller
  // Counts every change, so that meta.json is rewritten only if necessary.
  [[nodiscard]] std::uint64_t version() const noexcept;

  // For pthread_atfork: no thread holds the lock while the process forks.
  void lock() noexcept { lock_.lock(); }
  void unlock() noexcept { lock_.unlock(); }

 private:
  struct List {
    std::vector<std::string> names;
    std::unordered_map<std::string, std::uint16_t> ids;
    std::size_t limit = 0;
  };
  List& list_of(Kind kind) { return lists_[static_cast<std::size_t>(kind)]; }
  const List& list_of(Kind kind) const { return lists_[static_cast<std::size_t>(kind)]; }

  mutable SpinLock lock_;
  std::array<List, kKinds> lists_;
  std::vector<std::string> components_;  // up to the last module that has one
  std::vector<std::string> lines_;       // up to the last op that is one
  std::uint64_t version_ = 0;
};

// The process' names; never destroyed, because threads may outlive static destruction.
Names& names();

// Returns the id of a phase. Throws std::invalid_argument with one sentence if no phase has this
// name.
std::uint8_t phase_id(std::string_view name);

}  // namespace opacus_memprof
