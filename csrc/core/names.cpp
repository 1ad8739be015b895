// SPDX-License-Identifier: Apache-2.0
#include "core/names.h"

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "core/vocabulary.h"

namespace opacus_memprof {

namespace {

constexpr std::string_view kOther = "(other)";
constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// Returns the length of the UTF-8 character that starts with `first`; 0 if there is none.
std::size_t length_of(unsigned char first) noexcept {
  if (first < 0x80) return 1;
  if (first < 0xC2 || first > 0xF4) return 0;
  if (first < 0xE0) return 2;
  return first < 0xF0 ? 3 : 4;
}

// Returns whether `byte` may be number `at` of that character. Number 1 decides: this excludes
// overlong encodings, halves of UTF-16 pairs, and characters beyond U+10FFFF.
bool continues(unsigned char first, std::size_t at, unsigned char byte) noexcept {
  unsigned char low = 0x80;
  unsigned char high = 0xBF;
  if (at == 1) {
    if (first == 0xE0) low = 0xA0;
    if (first == 0xED) high = 0x9F;
    if (first == 0xF0) low = 0x90;
    if (first == 0xF4) high = 0x8F;
  }
  return low <= byte && byte <= high;
}

// Names come from any source, while meta.json and Python accept UTF-8 only. Linux cuts a thread's
// name after 15 bytes, perhaps inside a character; such an incomplete character is dropped.
std::string as_utf8(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const auto first = static_cast<unsigned char>(text[0]);
    const std::size_t length = length_of(first);
    std::size_t fits = 1;
    while (fits < std::min(length, text.size()) &&
           continues(first, fits, static_cast<unsigned char>(text[fits]))) {
      ++fits;
    }
    if (fits == length) {
      result += text.substr(0, length);
    } else if (length == 0 || fits < text.size()) {
      result += kReplacement;
    }
    text.remove_prefix(fits);
  }
  return result;
}

}  // namespace

Names::Names() {
  list_of(Kind::category).limit = kMaxCategories;
  list_of(Kind::module).limit = 0xFFFF;  // kKeep16 is not an id
  list_of(Kind::op).limit = 0xFFFF;
  list_of(Kind::thread).limit = 0x100;
  list_of(Kind::stream).limit = 0x100;
  for (const auto name : kCategoryNames) intern(Kind::category, name);
  for (const auto kind : {Kind::module, Kind::op, Kind::stream}) intern(kind, "");
}

std::uint16_t Names::intern(Kind kind, std::string_view name) {
  std::string key = as_utf8(name);  // allocated before the lock is taken
  const std::lock_guard guard(lock_);
  List& list = list_of(kind);
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

void Names::set_component(std::uint16_t module, std::string_view component) {
  std::string text = as_utf8(component);  // allocated before the lock is taken
  const std::lock_guard guard(lock_);
  if (components_.size() <= module) components_.resize(module + std::size_t{1});
  if (components_[module] == text) return;
  components_[module] = std::move(text);
  ++version_;
}

std::vector<std::string> Names::components() const {
  const std::lock_guard guard(lock_);
  std::vector<std::string> result = components_;
  result.resize(list_of(Kind::module).names.size());
  return result;
}

std::uint16_t Names::intern_line(std::string_view stack, std::string_view line) {
  if (size(Kind::op) >= list_of(Kind::op).limit / 2) return 0;
  const std::uint16_t id = intern(Kind::op, stack);
  std::string text = as_utf8(line);  // allocated before the lock is taken
  const std::lock_guard guard(lock_);
  if (lines_.size() <= id) lines_.resize(id + std::size_t{1});
  lines_[id] = std::move(text);
  return id;
}

std::vector<std::string> Names::lines() const {
  const std::lock_guard guard(lock_);
  std::vector<std::string> result = lines_;
  result.resize(list_of(Kind::op).names.size());
  return result;
}

std::vector<std::string> Names::list(Kind kind) const {
  const std::lock_guard guard(lock_);
  return list_of(kind).names;
}

std::string Names::name(Kind kind, std::size_t id) const {
  const std::lock_guard guard(lock_);
  return list_of(kind).names[id];
}

std::size_t Names::size(Kind kind) const noexcept {
  const std::lock_guard guard(lock_);
  return list_of(kind).names.size();
}

std::uint64_t Names::version() const noexcept {
  const std::lock_guard guard(lock_);
  return version_;
}

Names& names() {
  static auto* instance = new Names;
  return *instance;
}

std::uint8_t phase_id(std::string_view name) {
  const auto found = std::ranges::find(kPhaseNames, name);
  if (found == kPhaseNames.end()) {
    throw std::invalid_argument("unknown phase '" + std::string(name) + "'");
  }
  return static_cast<std::uint8_t>(found - kPhaseNames.begin());
}

}  // namespace opacus_memprof
