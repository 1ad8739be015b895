// SPDX-License-Identifier: Apache-2.0
// What writes to a device's memory outside of torch's operators, as an extension's own kernels and
// copies do, is told to the library that knows what the memory holds (csrc/virtual_values).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace opacus_memprof::virtual_gpu {

struct Observer {
  // Whether this thread runs an operator, which tells itself what it writes.
  int (*in_operator)() = nullptr;
  // A copy that is about to be made; 1 where a side is on a device.
  void (*copy)(void* to, int to_device, const void* from, int from_device,
               std::size_t size) = nullptr;
  // `width` bytes at `value`, `count` times.
  void (*fill)(void* to, const void* value, std::size_t width, std::size_t count) = nullptr;
  // Memory that the host writes, too.
  void (*share)(void* address, std::size_t size) = nullptr;
  // What a computation outside of operators reads, and how far that is known; what it writes is as
  // far known as the least of it.
  int (*read)(const void* address, std::size_t size) = nullptr;
  void (*written)(void* address, std::size_t size, int known) = nullptr;
  // A kernel has this address; `end` is that of the driver's allocation.
  void (*kernel)(void* address, void* end) = nullptr;
};

void observe(const Observer& observer);

// Tells of memory that the host writes, too.
void share(void* address, std::size_t size);

// Made where something is asked for, and told when it is done, which may be in replays of a graph.
class Outside {
 public:
  Outside();
  void copy(void* to, const void* from, std::size_t size) const;
  void fill(void* to, const void* value, std::size_t width, std::size_t count) const;
  [[nodiscard]] int read(const void* address, std::size_t size) const;
  void written(void* address, std::size_t size, int known) const;
  // Does nothing where no device's memory is there.
  void kernel_has(std::uintptr_t address) const;
  [[nodiscard]] explicit operator bool() const noexcept { return outside_; }

 private:
  bool outside_;
};

// Adds the addresses of device memory that stand in these bytes.
void note_addresses(const void* bytes, std::size_t size, std::vector<std::uintptr_t>& found);

}  // namespace opacus_memprof::virtual_gpu
