// SPDX-License-Identifier: Apache-2.0
#include "core/profile_directory.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "core/clock.h"
#include "core/names.h"

namespace opacus_memprof {

namespace {

using nlohmann::json;

constexpr const char* kAlreadyWritten =
    "events are being written already; end the running profile first";

// Never destroyed: threads may outlive static destruction.
std::unique_ptr<ProfileDirectory>& current() {
  static auto* const instance = new std::unique_ptr<ProfileDirectory>;
  return *instance;
}

[[noreturn]] void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

void replace_file(const std::string& path, const std::string& content) {
  const std::string temporary = path + ".tmp";
  errno = 0;
  {
    std::ofstream out(temporary, std::ios::binary | std::ios::trunc);
    out << content;
    out.flush();
    if (!out) throw_errno(temporary);
  }
  if (std::rename(temporary.c_str(), path.c_str()) != 0) throw_errno(path);
}

}  // namespace

std::map<std::string, std::vector<std::string>> all_names() {
  const Names& all = names();
  std::vector<std::string> devices;
  for (std::size_t id = 0; id < kMaxDevices; ++id) {
    devices.push_back(device_name(static_cast<Device>(id)));
  }
  return {{"categories", all.list(Names::Kind::category)},
          {"phases", {kPhaseNames.begin(), kPhaseNames.end()}},
          {"modules", all.list(Names::Kind::module)},
          {"components", all.components()},
          {"ops", all.list(Names::Kind::op)},
          {"lines", all.lines()},
          {"threads", all.list(Names::Kind::thread)},
          {"streams", all.list(Names::Kind::stream)},
          {"devices", devices}};
}

namespace {

// {"cuda:0": {"bytes", "step", "phase"}}, of devices whose allocator counts what it reserves.
json reserved_peaks() {
  json result = json::object();
  for (const auto& device : recorder().state().devices) {
    const ReservedPeak& peak = device.reserved;
    if (peak.bytes < 0) continue;
    result[device_name(device.device)] = {
        {"bytes", peak.bytes}, {"step", peak.step}, {"phase", kPhaseNames.at(peak.phase)}};
  }
  return result;
}

}  // namespace

ProfileDirectory::ProfileDirectory(std::string directory, std::uint64_t max_events,
                                   const std::string& info_json)
    : directory_(std::move(directory)), info_(info_json) {
  if (!json::accept(info_json) || !json::parse(info_json).is_object()) {
    throw std::invalid_argument("info_json must be the text of a JSON object");
  }
  if (recorder().events_status().recording) {
    throw std::logic_error(kAlreadyWritten);
  }
  replace_meta();
  recorder().start_events(std::make_unique<EventFile>(
      directory_ + "/events.bin", max_events,
      EventFile::Calls{
          .housekeeping = [this] { refresh_meta(); },
          .live_blocks = [](EventFile& file) { return recorder().resume_after_loss(file); }}));
}

ProfileDirectory::~ProfileDirectory() {
  recorder().stop_events().reset();
  refresh_meta();
}

void ProfileDirectory::write_meta() {
  recorder().flush_events();
  replace_meta();
}

void ProfileDirectory::replace_meta() {
  const std::lock_guard guard(mutex_);
  const std::uint64_t version = names().version() + recorder().reserved_version();
  json meta = json::parse(info_);
  meta["format"] = kFormatVersion;
  meta["record_bytes"] = sizeof(Event);
  meta["pid"] = ::getpid();
  meta["clock"] = {{"unix_ns", unix_ns()},
                   {"unit", "ticks; events.bin's header converts them to nanoseconds"}};
  meta["names"] = all_names();
  meta["reserved_peaks"] = reserved_peaks();
  replace_file(directory_ + "/meta.json", meta.dump(1));
  written_version_ = version;
}

void ProfileDirectory::refresh_meta() noexcept {
  try {
    if (names().version() + recorder().reserved_version() != written_version_) replace_meta();
  } catch (const std::exception&) {
    // events_status reports a full disk; the next refresh tries again.
  }
}

void start_profile_directory(const std::string& directory, std::uint64_t max_events,
                             const std::string& info_json) {
  if (current() != nullptr) throw std::runtime_error(kAlreadyWritten);
  current() = std::make_unique<ProfileDirectory>(directory, max_events, info_json);
}

ProfileDirectory& current_profile_directory() {
  if (current() == nullptr) {
    throw std::runtime_error("no events are being written; call start_events first");
  }
  return *current();
}

std::unique_ptr<ProfileDirectory> detach_profile_directory() { return std::move(current()); }

}  // namespace opacus_memprof
