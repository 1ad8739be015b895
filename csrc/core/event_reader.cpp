// SPDX-License-Identifier: Apache-2.0
#include "core/event_reader.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>

namespace opacus_memprof {
namespace {

static_assert(std::endian::native == std::endian::little, "event files are little endian");

constexpr std::size_t kChunkRecords = 16384;  // 512 KiB: stays in the second-level cache

}  // namespace

EventReader::EventReader(const std::string& path) : file_(path, std::ios::binary | std::ios::ate) {
  if (!file_) throw std::runtime_error("cannot open " + path + ": no such file, or no permission.");
  const auto end = file_.tellg();
  const std::uint64_t bytes = end < 0 ? 0 : static_cast<std::uint64_t>(end);
  file_.seekg(0);
  if (!file_.read(reinterpret_cast<char*>(&header_), sizeof(header_)) || bytes < kHeaderBytes) {
    throw std::runtime_error(path + " is truncated: it has " + std::to_string(bytes) +
                             " bytes, and the header alone takes " + std::to_string(kHeaderBytes) +
                             ".");
  }
  if (std::memcmp(header_.magic, kMagic, sizeof(kMagic)) != 0) {
    throw std::runtime_error(path + " is not an event file of opacus-memprof.");
  }
  if (header_.version != kFormatVersion || header_.record_bytes != sizeof(Event)) {
    throw std::runtime_error(
        path + " has format version " + std::to_string(header_.version) + " with records of " +
        std::to_string(header_.record_bytes) + " bytes; this release reads version " +
        std::to_string(kFormatVersion) + " with " + std::to_string(sizeof(Event)) +
        ": read it with the release that wrote it.");
  }
  // A writer that has not ended is ahead of its count; the first record without a kind is the end.
  const std::uint64_t room = (bytes - kHeaderBytes) / sizeof(Event);
  size_ = header_.closed != 0 ? std::min<std::uint64_t>(header_.count, room) : room;
  buffer_.resize(static_cast<std::size_t>(std::min<std::uint64_t>(size_, kChunkRecords)));
  rewind();
}

std::span<const Event> EventReader::next() {
  const auto records =
      static_cast<std::size_t>(std::min<std::uint64_t>(buffer_.size(), size_ - position_));
  if (records == 0) return {};
  file_.read(reinterpret_cast<char*>(buffer_.data()),
             static_cast<std::streamsize>(records * sizeof(Event)));
  const auto read = static_cast<std::size_t>(file_.gcount()) / sizeof(Event);
  position_ = read < records ? size_ : position_ + read;
  return {buffer_.data(), read};
}

void EventReader::rewind() {
  file_.clear();
  file_.seekg(static_cast<std::streamoff>(kHeaderBytes));
  position_ = 0;
}

}  // namespace opacus_memprof
