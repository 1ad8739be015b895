// SPDX-License-Identifier: Apache-2.0
// Addresses of device memory, given out from the lowest free one upwards, as the driver does.
//
// The order matters: of free blocks that serve a request equally well torch's caching allocator
// takes the one with the lowest address, and so splits and reserves other segments under another
// order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace virtual_gpu {

// Not thread safe. Sizes are multiples of kPage.
class AddressSpace {
 public:
  // Nothing of `size` exists until it is touched; 0 addresses where the kernel has not that many.
  explicit AddressSpace(std::size_t size);

  // Readable and writable addresses, which read as zero; nullptr where no gap is large enough.
  void* take(std::size_t size);
  // Drops what was written there.
  void give_back(void* address, std::size_t size);

 private:
  std::map<std::uintptr_t, std::size_t> gaps_;  // by start; neighbours are joined
};

}  // namespace virtual_gpu
