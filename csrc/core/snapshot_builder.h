// SPDX-License-Identifier: Apache-2.0
// Builds a TorchSnapshot from the dicts and lists of its pickle, each as soon as it is complete.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/hash_table.h"
#include "core/pickle_bytes.h"
#include "core/torch_snapshot.h"

namespace opacus_memprof {

enum class Kind : std::uint8_t { other, number, fraction, string, object, mark };

// `data` is the number, the string's index or the object's. A fraction has none, and stands for
// numbers beyond 64 bits, too.
struct PickleValue {
  Kind kind = Kind::other;
  std::uint64_t data = 0;
};

// What a dict or a list has become; `index` is its place among those of its type.
enum class Type : std::uint8_t { dict, list, frame, stack, entry, block, segment };
struct PickleObject {
  static constexpr std::uint32_t kEmpty = ~std::uint32_t{0};
  Type type;
  std::uint32_t index = kEmpty;
};

[[noreturn]] inline void refuse_values() { refuse("its values do not fit together"); }

class SnapshotBuilder {
 public:
  SnapshotBuilder() {
    result_.calls.push_back({.caller = 0, .frame = kNone});
    for (const std::string_view key : kKeys) intern(std::string(key));
  }

  // Returns the index of the string.
  std::uint32_t intern(std::string text) {
    if (const auto found = by_text_.find(text); found != by_text_.end()) return found->second;
    if (result_.strings.size() >= kMostStrings)
      refuse("it has more different texts than a snapshot");
    const auto index = static_cast<std::uint32_t>(result_.strings.size());
    by_text_.emplace(result_.strings.emplace_back(std::move(text)), index);
    return index;
  }

  std::size_t objects() const { return objects_.size(); }
  std::size_t lists() const { return lists_.size(); }
  std::uint64_t add_object(Type type) {
    objects_.push_back({type});
    return objects_.size() - 1;
  }

  void append(std::uint64_t object, std::span<const PickleValue> items) {
    PickleObject& list = objects_[object];
    if (list.type == Type::stack) return;  // of more than 1000 calls the outermost are left out
    if (list.type != Type::list) refuse_values();
    if (list.index == PickleObject::kEmpty && all_frames(items)) {
      list = {Type::stack, stack_of(items)};
      return;
    }
    if (list.index == PickleObject::kEmpty) {
      list.index = static_cast<std::uint32_t>(lists_.size());
      lists_.emplace_back();
    }
    for (const auto& [kind, data] : items) {
      lists_[list.index].push_back(kind == Kind::object ? static_cast<std::uint32_t>(data) : kNone);
    }
  }

  // `items` are keys and values in turn.
  void set_items(std::uint64_t object, std::span<const PickleValue> items) {
    PickleObject& dict = objects_[object];
    if (items.size() % 2 != 0 || dict.type != Type::dict) refuse_values();
    Values values{};
    std::uint32_t given = 0;
    for (std::size_t i = 0; i < items.size(); i += 2) {
      if (items[i].kind != Kind::string || items[i].data >= kKeys.size()) continue;
      values[items[i].data] = items[i + 1];
      given |= 1U << items[i].data;
    }
    const auto has = [given](auto... keys) { return ((given >> keys & 1U) && ...); };
    if (has(kAction, kSize, kStream)) {
      dict = entry(values);
    } else if (has(kName, kFile, kLine)) {
      dict = frame(values);
    } else if (has(kState, kAddress, kSize)) {
      dict = block(values, has(kRequested));
    } else if (has(kBlocks, kTotal, kAddress)) {
      dict = segment(values);
    } else if (has(kSegments, kTraces)) {
      whole_ = {values[kSegments], values[kTraces]};
    }
  }

  // Gives entries and blocks their devices, and leaves out those of pinned memory, which have none.
  TorchSnapshot finish() {
    if (!whole_) refuse("it is not a memory snapshot with segments and device_traces");
    std::vector<TorchSnapshot::Segment> segments;
    std::uint64_t next_segment = 0;
    std::uint64_t next_block = 0;
    for_each_of(whole_->first, Type::segment, next_segment, [&](std::uint32_t index) {
      const TorchSnapshot::Segment& segment = segments.emplace_back(result_.segments[index]);
      for_each_of(blocks_of_[index], Type::block, next_block, [&](std::uint32_t place) {
        TorchSnapshot::Block& block = result_.blocks[place];
        if (block.requested == kLargest) refuse("it was written by a torch older than 2.1");
        block.device = segment.device;
        block.stream = segment.stream;
        block.segment = segments.size() - 1;
      });
    });
    result_.segments = std::move(segments);
    std::erase_if(result_.blocks, [](const auto& block) { return block.device == kNone; });
    std::uint32_t device = 0;
    std::uint64_t next_entry = 0;
    for (const std::uint32_t trace : items_of(whole_->second)) {
      if (trace == kNone || device == 255) refuse_values();
      for_each_of({Kind::object, trace}, Type::entry, next_entry,
                  [&](std::uint32_t index) { result_.entries[index].device = device; });
      ++device;
    }
    std::erase_if(result_.entries, [](const auto& entry) { return entry.device == kNone; });
    return std::move(result_);
  }

 private:
  static constexpr std::uint32_t kNone = TorchSnapshot::kNone;
  static constexpr std::uint64_t kLargest = std::uint64_t{1} << 48U;  // above addresses and sizes
  static constexpr std::uint64_t kLatest = std::uint64_t{1} << 53U;   // microseconds: in 2255
  // What a program's code bounds, whatever the length of its trace. Each takes up to 0.5 KB here
  // and in analysis/stacks.py.
  static constexpr std::size_t kMostCalls = std::size_t{1} << 21U;
  static constexpr std::size_t kMostStrings = std::size_t{1} << 22U;

  // Keys of a snapshot's dicts, whose strings have these indices.
  enum Key : std::uint32_t {
    kSegments,
    kTraces,
    kAction,
    kAddr,
    kSize,
    kStream,
    kTime,
    kFrames,
    kMetadata,
    kName,
    kFile,
    kLine,
    kAddress,
    kRequested,
    kState,
    kBlocks,
    kDevice,
    kTotal,
    kExpandable
  };
  static constexpr std::array<std::string_view, 19> kKeys{
      "segments", "device_traces", "action",     "addr",           "size",
      "stream",   "time_us",       "frames",     "user_metadata",  "name",
      "filename", "line",          "address",    "requested_size", "state",
      "blocks",   "device",        "total_size", "is_expandable"};
  using Values = std::array<PickleValue, kKeys.size()>;

  struct Slot {
    std::uint64_t key = 0;
    std::uint32_t node = 0;
    [[nodiscard]] bool used() const { return node != 0; }
    [[nodiscard]] std::uint64_t hash() const { return hash_of_call(key); }
  };
  // Of frames, which a pickle without a memo writes again and again.
  struct FrameSlot {
    std::uint64_t function = 0;
    std::uint32_t line = 0;
    std::uint32_t number = 0;  // from 1
    [[nodiscard]] bool used() const { return number != 0; }
    [[nodiscard]] std::uint64_t hash() const {
      return hash_of_call(function ^ std::uint64_t{line} << 12U);
    }
  };
  static std::uint64_t hash_of_call(std::uint64_t key) { return hash_of(key ^ key >> 29U); }

  [[nodiscard]] const PickleObject* object(const PickleValue& value) const {
    return value.kind == Kind::object ? &objects_[value.data] : nullptr;
  }
  [[nodiscard]] bool all_frames(std::span<const PickleValue> items) const {
    for (const PickleValue& item : items) {
      const PickleObject* frame = object(item);
      if (frame == nullptr || frame->type != Type::frame) return false;
    }
    return !items.empty();
  }
  // Returns the node of a stack, whose innermost frame comes first.
  std::uint32_t stack_of(std::span<const PickleValue> frames) {
    std::uint32_t node = 0;
    for (auto frame = frames.rbegin(); frame != frames.rend(); ++frame) {
      const TorchSnapshot::Call call{.caller = node, .frame = objects_[frame->data].index};
      const std::uint64_t key = std::uint64_t{call.caller} << 32U | call.frame;
      const auto [slot, added] = calls_.try_emplace(
          hash_of_call(key), [key](const Slot& slot) { return slot.key == key; });
      if (added) {
        if (result_.calls.size() >= kMostCalls) {
          refuse("it has more different stacks than a snapshot");
        }
        *slot = {.key = key, .node = static_cast<std::uint32_t>(result_.calls.size())};
        result_.calls.push_back(call);
      }
      node = slot->node;
    }
    return node;
  }

  // Absent numbers are 0.
  static std::uint64_t number(const PickleValue& value, std::uint64_t end = ~std::uint64_t{0}) {
    if (value.kind == Kind::other) return 0;
    if (value.kind != Kind::number || value.data >= end) refuse_values();
    return value.data;
  }
  static std::uint32_t string(const PickleValue& value) {
    return value.kind == Kind::string ? static_cast<std::uint32_t>(value.data) : kNone;
  }
  [[nodiscard]] std::uint32_t stack(const PickleValue& value) const {
    const PickleObject* found = object(value);
    return found != nullptr && found->type == Type::stack ? found->index : 0;
  }
  template <typename Item>
  static PickleObject add(std::vector<Item>& items, Type type, const Item& item) {
    if (items.size() >= kNone) refuse("it has more entries than can be counted");
    items.push_back(item);
    return {type, static_cast<std::uint32_t>(items.size() - 1)};
  }
  PickleObject frame(const Values& values) {
    const TorchSnapshot::Frame frame{.name = string(values[kName]),
                                     .file = string(values[kFile]),
                                     .line = static_cast<std::uint32_t>(number(values[kLine]))};
    if (frame.name == kNone || frame.file == kNone) refuse_values();
    const std::uint64_t function = std::uint64_t{frame.name} << 32U | frame.file;
    const auto [slot, added] = frames_.try_emplace(
        hash_of_call(function ^ std::uint64_t{frame.line} << 12U), [&](const FrameSlot& slot) {
          return slot.function == function && slot.line == frame.line;
        });
    if (added) {
      if (result_.frames.size() >= kMostCalls)
        refuse("it has more different frames than a snapshot");
      result_.frames.push_back(frame);
      *slot = {.function = function,
               .line = frame.line,
               .number = static_cast<std::uint32_t>(result_.frames.size())};
    }
    return {Type::frame, slot->number - 1};
  }
  PickleObject entry(const Values& values) {
    return add(result_.entries, Type::entry,
               {.address = number(values[kAddr], kLargest),
                .size = number(values[kSize], kLargest),
                .stream = number(values[kStream]),
                .time_us = number(values[kTime], kLatest),
                .stack = stack(values[kFrames]),
                .action = string(values[kAction]),
                .metadata = string(values[kMetadata]),
                .device = kNone});
  }
  PickleObject block(const Values& values, bool counts_requested) {
    return add(result_.blocks, Type::block,
               {.address = number(values[kAddress], kLargest),
                .size = number(values[kSize], kLargest),
                .requested = counts_requested ? number(values[kRequested], kLargest) : kLargest,
                .stream = 0,
                .stack = stack(values[kFrames]),
                .state = string(values[kState]),
                .metadata = string(values[kMetadata]),
                .device = kNone,
                .segment = 0});
  }
  PickleObject segment(const Values& values) {
    blocks_of_.push_back(values[kBlocks]);
    return add(result_.segments, Type::segment,
               {.address = number(values[kAddress], kLargest),
                .size = number(values[kTotal], kLargest),
                .stream = number(values[kStream]),
                .device = static_cast<std::uint32_t>(number(values[kDevice], 255)),
                .expandable = static_cast<std::uint32_t>(number(values[kExpandable], 2))});
  }

  [[nodiscard]] std::span<const std::uint32_t> items_of(const PickleValue& value) const {
    const PickleObject* list = object(value);
    if (list == nullptr || list->type != Type::list) refuse_values();
    if (list->index == PickleObject::kEmpty) return {};
    return lists_[list->index];
  }
  // Calls `function` with the index of each item. torch writes each item once, in order; lists that
  // repeat items could make a small file arbitrarily large.
  template <typename Function>
  void for_each_of(const PickleValue& value, Type type, std::uint64_t& next, Function function) {
    for (const std::uint32_t item : items_of(value)) {
      if (item == kNone || objects_[item].type != type || objects_[item].index < next) {
        refuse_values();
      }
      next = objects_[item].index + std::uint64_t{1};
      function(objects_[item].index);
    }
  }

  TorchSnapshot result_;
  std::unordered_map<std::string_view, std::uint32_t> by_text_;
  HashTable<Slot, 2> calls_{16};
  HashTable<FrameSlot, 2> frames_{16};
  std::vector<PickleObject> objects_;
  std::vector<std::vector<std::uint32_t>> lists_;             // of objects
  std::vector<PickleValue> blocks_of_;                        // by segment
  std::optional<std::pair<PickleValue, PickleValue>> whole_;  // segments and device_traces
};

}  // namespace opacus_memprof
