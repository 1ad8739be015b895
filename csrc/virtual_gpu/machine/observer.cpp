// SPDX-License-Identifier: Apache-2.0
#include "virtual_gpu/machine/observer.h"

#include <cstring>

#include "virtual_gpu/machine/common.h"
#include "virtual_gpu/machine/machine.h"

namespace opacus_memprof::virtual_gpu {
namespace {

Observer& observer() {
  static Observer only;
  return only;
}

int on_device(const void* address) {
  const auto range = machine().memory.find(address);
  return static_cast<int>(range && range->kind != Kind::pinned);
}

}  // namespace

void observe(const Observer& given) { observer() = given; }

void share(void* address, std::size_t size) {
  if (observer().share != nullptr) observer().share(address, size);
}

Outside::Outside() : outside_(observer().in_operator != nullptr && observer().in_operator() == 0) {}

void Outside::copy(void* to, const void* from, std::size_t size) const {
  if (!outside_ || size == 0) return;
  const int to_device = on_device(to);
  const int from_device = on_device(from);
  if (to_device != 0 || from_device != 0) observer().copy(to, to_device, from, from_device, size);
}

void Outside::fill(void* to, const void* value, std::size_t width, std::size_t count) const {
  if (outside_ && on_device(to) != 0) observer().fill(to, value, width, count);
}

int Outside::read(const void* address, std::size_t size) const {
  return outside_ && size > 0 ? observer().read(address, size) : 0;
}

void Outside::written(void* address, std::size_t size, int known) const {
  if (outside_ && size > 0) observer().written(address, size, known);
}

void Outside::kernel_has(std::uintptr_t address) const {
  if (!outside_) return;
  const auto range = machine().memory.find(pointer(address));
  if (range && range->kind != Kind::pinned)
    observer().kernel(pointer(address), pointer(range->start + range->size));
}

void note_addresses(const void* bytes, std::size_t size, std::vector<std::uintptr_t>& found) {
  for (std::size_t at = 0; at + sizeof(std::uintptr_t) <= size; at += sizeof(std::uintptr_t)) {
    std::uintptr_t address = 0;
    std::memcpy(&address, static_cast<const char*>(bytes) + at, sizeof address);
    const auto range = machine().memory.find(pointer(address));
    if (range && range->kind != Kind::pinned) found.push_back(address);
  }
}

}  // namespace opacus_memprof::virtual_gpu
