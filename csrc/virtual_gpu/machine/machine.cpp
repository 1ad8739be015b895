// SPDX-License-Identifier: Apache-2.0
#include "virtual_gpu/machine/machine.h"

#include <pthread.h>

#include <atomic>
#include <cstring>

#include "virtual_gpu/machine/common.h"
#include "virtual_gpu/machine/limits.h"

namespace opacus_memprof::virtual_gpu {

namespace {

std::atomic<bool> used = false;
std::atomic<bool> lost = false;

}  // namespace

Machine& machine() {
  static auto* const only = [] {
    pthread_atfork(nullptr, nullptr, [] { lost = used.load(); });
    return new Machine;
  }();
  return *only;
}

bool usable() {
  if (machine().devices.empty() || asks_without_driver()) {
    return !machine().devices.empty();
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

bool valid_device(int device) {
  return usable() && device >= 0 && device < static_cast<int>(machine().devices.size());
}

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
