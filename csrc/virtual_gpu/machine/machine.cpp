// SPDX-License-Identifier: Apache-2.0
#include "virtual_gpu/machine/machine.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "virtual_gpu/machine/common.h"
#include "virtual_gpu/machine/limits.h"

namespace opacus_memprof::virtual_gpu {

namespace {

std::atomic<bool> used = false;
std::atomic<bool> lost = false;
// The devices that the program sees, once it uses the driver, which does not look again.
std::atomic<int> seen = -1;

// A word of CUDA_VISIBLE_DEVICES: a device's number, or its UUID ("GPU-...", "MIG-...").
struct Name {
  int number;
  std::string uuid;
};

std::string own_uuid(int number) {
  char text[41];
  std::snprintf(text, sizeof text, "GPU-76697274-7561-6c20-6770-7500%08x",
                static_cast<unsigned>(number));
  return text;
}

bool is_named(const std::vector<Name>& names, int number) {
  return std::any_of(names.begin(), names.end(),
                     [&](const Name& other) { return other.number == number; });
}

// The words of CUDA_VISIBLE_DEVICES up to one that names nothing, as the driver reads them; none if
// a device occurs twice. A UUID of another machine's device gets a number that no other word has.
std::vector<Name> named_devices(const std::string& text) {
  std::vector<Name> names;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    begin = end + 1;
    if (word.rfind("GPU-", 0) == 0 || word.rfind("MIG-", 0) == 0) {
      names.push_back({-1, word});
      for (int number = 0; number < static_cast<int>(machine().devices.size()); ++number) {
        names.back().number = own_uuid(number).rfind(word, 0) == 0 ? number : names.back().number;
      }
      continue;
    }
    char* rest = nullptr;
    const long number = std::strtol(word.c_str(), &rest, 10);
    if (rest == word.c_str() || number < 0 || number > 1 << 16) {
      break;
    }
    names.push_back({static_cast<int>(number), ""});
  }
  for (std::size_t place = 0; place < names.size(); ++place) {
    const Name& name = names[place];
    if (std::any_of(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(place),
                    [&](const Name& before) {
                      return before.uuid == name.uuid && before.number == name.number;
                    })) {
      return {};
    }
  }
  for (Name& name : names) {
    for (int number = 0; name.number < 0; ++number) {
      name.number = is_named(names, number) ? -1 : number;
    }
  }
  return names;
}

// The devices that the program sees.
std::vector<Name> visible_names() {
  std::vector<Name> names;
  if (const char* const text = std::getenv("CUDA_VISIBLE_DEVICES"); text != nullptr) {
    names = named_devices(text);
    names.resize(std::min(names.size(), machine().devices.size()));
  } else {
    for (std::size_t number = 0; number < machine().devices.size(); ++number) {
      names.push_back({static_cast<int>(number), ""});
    }
  }
  return names;
}

}  // namespace

Machine& machine() {
  static auto* const only = [] {
    pthread_atfork(nullptr, nullptr, [] { lost = used.load(); });
    return new Machine;
  }();
  return *only;
}

int visible_devices() {
  if (seen >= 0) {
    return seen;
  }
  const int visible = static_cast<int>(visible_names().size());
  if (used) {
    seen = visible;
  }
  return visible;
}

int present_devices() {
  int present = static_cast<int>(machine().devices.size());
  for (const Name& name : visible_names()) {
    present = std::max(present, name.number + 1);
  }
  return present;
}

std::string uuid_of(int number) {
  std::string uuid = own_uuid(number);
  for (const Name& name : visible_names()) {
    if (name.number == number && name.uuid.rfind("GPU-", 0) == 0) {
      const std::size_t size = std::min(name.uuid.size(), uuid.size());  // a beginning is enough
      uuid.replace(0, size, name.uuid, 0, size);
    }
  }
  return uuid;
}

int device_of(int number) {
  const std::vector<Name> names = visible_names();
  const auto found = std::find_if(names.begin(), names.end(),
                                  [&](const Name& name) { return name.number == number; });
  return found == names.end() ? 0 : static_cast<int>(found - names.begin());
}

int number_of(int device) {
  const std::vector<Name> names = visible_names();
  const auto place = static_cast<std::size_t>(device);
  return place < names.size() ? names[place].number : device;
}

bool usable() {
  if (visible_devices() == 0 || asks_without_driver()) {
    return visible_devices() > 0;
  }
  used = true;
  return !lost;
}

bool& asks_without_driver() {
  thread_local bool asks = false;
  return asks;
}

bool lost_by_fork() { return lost; }

int& current_device() {
  thread_local int device = 0;
  return device;
}

bool valid_device(int device) { return usable() && device >= 0 && device < visible_devices(); }

namespace {

bool on_device(const void* address) {
  const auto range = machine().memory.find(address);
  return range && range->kind != Kind::pinned;
}

}  // namespace

void copy(void* to, const void* from, std::size_t size) {
  if (size <= kSmall) {
    std::memmove(to, from, size);
  } else if (!on_device(to)) {
    if (on_device(from)) {
      std::memset(to, 0, size);
    } else {
      std::memmove(to, from, size);
    }
  }
}

void copy_rows(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
               std::size_t width, std::size_t height) {
  const bool kept = width * height <= kSmall || !on_device(to);
  for (std::size_t row = 0; row < height && kept; ++row) {
    char* const target = static_cast<char*>(to) + row * to_pitch;
    const char* const source = static_cast<const char*>(from) + row * from_pitch;
    if (width * height > kSmall && on_device(from)) {
      std::memset(target, 0, width);
    } else {
      std::memmove(target, source, width);
    }
  }
}

void fill(void* to, int value, std::size_t size) {
  if (size <= kSmall || !on_device(to)) {
    std::memset(to, value, size);
  }
}

void fill_pattern(void* to, const void* value, std::size_t width, std::size_t count) {
  if (width * count <= kSmall || !on_device(to)) {
    for (std::size_t index = 0; index < count; ++index) {
      std::memcpy(static_cast<char*>(to) + index * width, value, width);
    }
  }
}

}  // namespace opacus_memprof::virtual_gpu
