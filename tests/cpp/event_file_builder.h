// SPDX-License-Identifier: Apache-2.0
// Writes event files by hand, for tests of their readers.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "core/event.h"
#include "core/vocabulary.h"

namespace opacus_memprof::testing {

// A folder of this process, which goes with it: the tests of two builds may run at once.
inline const std::filesystem::path& scratch() {
  struct Folder {
    Folder() {
      std::string pattern = (std::filesystem::temp_directory_path() / "memprof_XXXXXX").string();
      path = ::mkdtemp(pattern.data());
    }
    ~Folder() { std::filesystem::remove_all(path); }
    std::filesystem::path path;
  };
  static const Folder folder;
  return folder.path;
}

// One line an event; fields that are not named stay 0.
struct EventSpec {
  EventKind kind = EventKind::none;
  std::uint64_t address = 0;
  std::uint64_t size = 0;
  Category category = Category::unattributed;
  Phase phase = Phase::idle;
  std::uint32_t step = 0;
  std::uint8_t device = 1;
  std::uint16_t module = 0;
  std::uint16_t op = 0;
  std::uint64_t time = 0;  // 0: one tick after the event before
  std::uint8_t stream = 0;
  std::uint8_t thread = 0;
};

class EventFileBuilder {
 public:
  EventFileBuilder() {
    std::memcpy(header.magic, kMagic, sizeof(kMagic));
    header.version = kWholeFileVersion;
    header.record_bytes = sizeof(Event);
    header.start_ticks = 1000;
    header.last_ticks = 2000;
    header.start_unix_ns = 50'000;
    header.last_unix_ns = 52'000;  // 2 ns a tick
    header.closed = 1;
  }

  EventFileBuilder& add(const EventSpec& spec) {
    Event event{};
    event.kind = static_cast<std::uint8_t>(spec.kind);
    event.address = spec.address & ((std::uint64_t{1} << 48) - 1);
    event.size = spec.size & ((std::uint64_t{1} << 48) - 1);
    event.category = static_cast<std::uint8_t>(spec.category);
    event.phase = static_cast<std::uint8_t>(spec.phase);
    event.step = spec.step;
    event.device = spec.device;
    event.module = spec.module;
    event.op = spec.op;
    event.stream = spec.stream;
    event.thread = spec.thread;
    const std::uint64_t before = events.empty() ? 0 : events.back().time;
    event.time = (spec.time != 0 ? spec.time : before + 1) & ((std::uint64_t{1} << 48) - 1);
    events.push_back(event);
    header.count = events.size();
    return *this;
  }

  // The file's path; it is overwritten by the next write of this process.
  [[nodiscard]] std::string write() const {
    const std::string path = (scratch() / "written.bin").string();
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    std::vector<char> page(kHeaderBytes);
    std::memcpy(page.data(), &header, sizeof(header));
    file.write(page.data(), static_cast<std::streamsize>(page.size()));
    file.write(reinterpret_cast<const char*>(events.data()),
               static_cast<std::streamsize>(events.size() * sizeof(Event)));
    return path;
  }

  FileHeader header{};
  std::vector<Event> events;
};

}  // namespace opacus_memprof::testing
