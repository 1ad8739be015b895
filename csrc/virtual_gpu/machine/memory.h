// SPDX-License-Identifier: Apache-2.0
// Memory of the virtual GPUs: address space without pages behind it, and the books of who holds
// what.
//
// An address is one of this process, readable and writable; the kernel gives it a page, which reads
// as zero, when something touches it. So a model of 100 GB takes what its small tensors take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "virtual_gpu/machine/address_space.h"

namespace opacus_memprof::virtual_gpu {

enum class Kind : std::uint8_t { device, pinned, managed };

struct Range {
  std::uintptr_t start = 0;
  std::size_t size = 0;
  Kind kind = Kind::device;
  int device = 0;
  bool ours = true;  // mapped here, and not memory of the program that was pinned
};

// Thread safe. Sizes in bytes. Nothing here throws but std::bad_alloc.
class Memory {
 public:
  // Each device starts with `context` of `total` bytes taken.
  void add_device(std::size_t total, std::size_t context);
  [[nodiscard]] int devices() const;

  // Device memory, rounded up to the driver's pages; nullptr where the device has not that much
  // left.
  void* allocate(int device, std::size_t size, Kind kind = Kind::device);
  // Host memory that counts as pinned.
  void* allocate_pinned(std::size_t size);
  bool pin(void* address, std::size_t size);
  // Frees what starts at this address, and unpins what was the program's; false where nothing
  // starts there.
  bool release(void* address);
  [[nodiscard]] std::optional<Range> find(const void* address) const;

  [[nodiscard]] std::size_t total(int device) const;
  [[nodiscard]] std::size_t free(int device) const;

  // What the driver does with a device's addresses then; see AddressSpace.
  void launch_kernel(int device);
  void create_cublas_handle(int device);
  void create_cudnn_handle(int device);

  // Memory that has no addresses (cuMemCreate): false where the device has not that much left.
  bool take(int device, std::size_t size);
  void give_back(int device, std::size_t size);

  // Addresses without memory (cuMemAddressReserve). Memory that is mapped there can be looked up.
  void* reserve_addresses(std::size_t size);
  bool release_addresses(void* address, std::size_t size);
  bool map(void* address, std::size_t size, int device);
  bool unmap(void* address, std::size_t size);

 private:
  struct Device {
    std::size_t total = 0;
    std::size_t used = 0;
    AddressSpace addresses;
  };
  bool take_locked(int device, std::size_t size);

  mutable std::mutex mutex_;
  std::vector<Device> devices_;
  std::map<std::uintptr_t, Range> ranges_;              // by start; they do not overlap
  std::map<std::uintptr_t, std::size_t> reservations_;  // of addresses
};

}  // namespace opacus_memprof::virtual_gpu
