// SPDX-License-Identifier: Apache-2.0
// The part of a profile directory that is written during training: the event files and meta.json.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/recorder.h"

namespace opacus_memprof {

// All names by kind, each at its id: {"categories": [...], "phases": [...], ...}.
std::map<std::string, std::vector<std::string>> all_names();

class ProfileDirectory {
 public:
  // Starts writing the recorder's events. `info_json` is an object whose keys (versions, devices,
  // …) are merged into meta.json. Throws std::system_error, std::invalid_argument,
  // std::logic_error.
  ProfileDirectory(std::string directory, std::uint64_t max_events, const std::string& info_json);
  ProfileDirectory(const ProfileDirectory&) = delete;
  ProfileDirectory& operator=(const ProfileDirectory&) = delete;
  // Ends the event file and writes the last meta.json.
  ~ProfileDirectory();

  // Updates the directory: all events so far are in the files, and meta.json is replaced
  // atomically. Throws std::system_error.
  void write_meta();

 private:
  void replace_meta();
  void refresh_meta() noexcept;  // if a name is new, or a reserved peak rose, since it was written

  std::string directory_;
  std::string info_;
  std::mutex mutex_;  // one writer of meta.json at a time
  std::atomic<std::uint64_t> written_version_{0};
};

// The process writes at most one directory at a time. Called with the GIL held, or by one thread.

// Does what the constructor does. Throws std::runtime_error if one is being written.
void start_profile_directory(const std::string& directory, std::uint64_t max_events,
                             const std::string& info_json);
// The directory that is being written. Throws std::runtime_error if there is none.
ProfileDirectory& current_profile_directory();
// Returns the directory that is being written, if any; the caller destroys it.
std::unique_ptr<ProfileDirectory> detach_profile_directory();

}  // namespace opacus_memprof
