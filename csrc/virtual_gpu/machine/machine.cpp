// SPDX-License-Identifier: Apache-2.0
#include "virtual_gpu/machine/machine.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <numeric>
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

// The numbers in CUDA_VISIBLE_DEVICES up to a word that is none, as the driver reads them.
std::vector<int> named_devices(const std::string& text) {
  std::vector<int> named;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    char* rest = nullptr;
    const long number = std::strtol(word.c_str(), &rest, 10);
    if (rest == word.c_str() || number < 0 || number > 1 << 16) {
      break;
    }
    if (std::find(named.begin(), named.end(), number) != named.end()) {
      return {};
    }
    named.push_back(static_cast<int>(number));
    begin = end + 1;
  }
  return named;
}

// The numbers of the devices that the program sees.
std::vector<int> visible_names() {
  std::vector<int> names;
  if (const char* const text = std::getenv("CUDA_VISIBLE_DEVICES"); text != nullptr) {
    names = named_devices(text);
    names.resize(std::min(names.size(), machine().devices.size()));
  } else {
    names.resize(machine().devices.size());
    std::iota(names.begin(), names.end(), 0);
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
  for (const int name : visible_names()) {
    present = std::max(present, name + 1);
  }
  return present;
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
