// SPDX-License-Identifier: Apache-2.0
// The bytes of a file, one after the other, for readers of pickles.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

namespace opacus_memprof {

// `reason` completes the sentence "the file cannot be read: …".
[[noreturn]] inline void refuse(const std::string& reason) { throw std::runtime_error(reason); }

// The file's bytes, one after the other.
class PickleBytes {
 public:
  explicit PickleBytes(const std::string& path) {
    std::error_code error;
    if (!std::filesystem::is_regular_file(path, error)) refuse("it is not a regular file");
    file_.open(path, std::ios::binary);
    if (!file_) refuse("it cannot be opened");
  }

  std::uint8_t next() {
    if (place_ == end_) [[unlikely]]
      fill();
    return static_cast<std::uint8_t>(buffer_[place_++]);
  }
  // A number of `size` bytes, little endian.
  std::uint64_t number(unsigned size) {
    std::uint64_t result = 0;
    for (unsigned i = 0; i < size; ++i) result |= std::uint64_t{next()} << 8U * i;
    return result;
  }
  std::string text(std::uint64_t size) {
    if (size > kLongestString) refuse("it has a string of " + std::to_string(size) + " bytes");
    std::string result;
    while (result.size() < size) {
      if (place_ == end_) fill();
      const std::size_t part =
          std::min(end_ - place_, static_cast<std::size_t>(size) - result.size());
      result.append(&buffer_[place_], part);
      place_ += part;
    }
    return result;
  }
  // Bytes so far.
  [[nodiscard]] std::uint64_t position() const { return before_ + place_; }

 private:
  static constexpr std::size_t kBufferBytes = std::size_t{1} << 20U;
  static constexpr std::size_t kLongestString = std::size_t{1} << 24U;

  [[gnu::noinline]] void fill() {
    before_ += end_;
    file_.read(buffer_.data(), static_cast<std::streamsize>(buffer_.size()));
    end_ = static_cast<std::size_t>(file_.gcount());
    place_ = 0;
    if (end_ == 0)
      refuse("it ends after " + std::to_string(before_) + " bytes, within the snapshot");
  }

  std::ifstream file_;
  std::vector<char> buffer_ = std::vector<char>(kBufferBytes);
  std::size_t place_ = 0;
  std::size_t end_ = 0;
  std::uint64_t before_ = 0;
};

}  // namespace opacus_memprof
