// SPDX-License-Identifier: Apache-2.0
#include "core/names.h"

#include <mutex>
#include <stdexcept>

#include "core/vocabulary.h"

namespace opacus_memprof {

namespace {
constexpr std::string_view kOther = "(other)";
}

Names::Names() {
  of(Kind::category).limit = kMaxCategories;
  of(Kind::module).limit = 0xFFFF;  // kKeep16 is no id
  of(Kind::op).limit = 0xFFFF;
  of(Kind::thread).limit = 0x100;
  of(Kind::stream).limit = 0x100;
  for (const auto name : kCategoryNames) intern(Kind::category, name);
  for (const auto kind : {Kind::module, Kind::op, Kind::stream}) intern(kind, "");
}

std::uint16_t Names::intern(Kind kind, std::string_view name) {
  std::string key(name);  // allocated before the lock is taken
  const std::lock_guard guard(lock_);
  List& list = of(kind);
  if (const auto found = list.ids.find(key); found != list.ids.end()) {
    return found->second;
  }
  if (list.names.size() + 1 == list.limit) key = kOther;
  if (list.names.size() < list.limit) {
    list.ids.emplace(key, static_cast<std::uint16_t>(list.names.size()));
    list.names.push_back(std::move(key));
    ++version_;
  }
  return static_cast<std::uint16_t>(list.names.size() - 1);
}

std::uint16_t Names::intern_or_throw(Kind kind, std::string_view name) {
  const auto id = intern(kind, name);
  if (name != kOther && list(kind)[id] == kOther) {
    throw std::out_of_range("no room for another name: '" + std::string(name) +
                            "' would be number " + std::to_string(id + 1) + "; use fewer names");
  }
  return id;
}

std::vector<std::string> Names::list(Kind kind) const {
  const std::lock_guard guard(lock_);
  return of(kind).names;
}

std::uint64_t Names::version() const noexcept {
  const std::lock_guard guard(lock_);
  return version_;
}

Names& names() {
  static auto* instance = new Names;
  return *instance;
}

}  // namespace opacus_memprof
