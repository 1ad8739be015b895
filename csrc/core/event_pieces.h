// SPDX-License-Identifier: Apache-2.0
// The files with a run's events: events.bin, events.1.bin, events.2.bin … (docs/format.md).
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace opacus_memprof {

inline constexpr std::string_view kPieceSuffix = ".bin";

// `path` without its suffix.
inline std::string piece_stem(const std::string& path) {
  return path.ends_with(kPieceSuffix) ? path.substr(0, path.size() - kPieceSuffix.size()) : path;
}

// The path of a piece of the run whose first piece is at `path`.
inline std::string piece_path(const std::string& path, std::uint64_t piece) {
  if (piece == 0) return path;
  return piece_stem(path) + "." + std::to_string(piece) + std::string(kPieceSuffix);
}

// The paths of the existing pieces after the first, in no particular order.
inline std::vector<std::string> later_pieces(const std::string& path) {
  namespace fs = std::filesystem;
  std::vector<std::string> found;
  const fs::path stem(piece_stem(path));
  const std::string begin = stem.filename().string() + ".";
  const fs::path folder = stem.has_parent_path() ? stem.parent_path() : ".";
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename().string();
    if (!name.starts_with(begin) || !name.ends_with(kPieceSuffix)) continue;
    if (name.size() <= begin.size() + kPieceSuffix.size()) continue;
    const std::string number = name.substr(begin.size(), name.size() - begin.size() - 4);
    if (number.find_first_not_of("0123456789") == std::string::npos) {
      found.push_back(at->path().string());
    }
  }
  return found;
}

}  // namespace opacus_memprof
