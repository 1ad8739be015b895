// SPDX-License-Identifier: Apache-2.0
// The pool of cudaMallocAsync: reserves chunks of the device's memory, and cuts blocks from them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "virtual_gpu/machine/memory.h"

namespace opacus_memprof::virtual_gpu {

// Thread safe. Sizes in bytes.
class Pool {
 public:
  // The driver takes memory for a pool in steps of this size, and cuts it in units.
  // benchmarks/virtual_gpu/constants.py measures both.
  static constexpr std::size_t kChunk = std::size_t{32} << 20U;
  static constexpr std::size_t kUnit = 512;

  struct Figures {
    std::size_t current = 0;
    std::size_t high = 0;
  };

  Pool(Memory& memory, int device) : memory_(memory), device_(device) {}

  // Returns nullptr if the device has too little memory left.
  void* allocate(std::size_t size);
  // Returns false if the address is not a block of this pool.
  bool release(void* address);
  // Returns empty chunks to the device while more than `keep` bytes are reserved.
  void trim(std::size_t keep);

  [[nodiscard]] Figures used() const;
  [[nodiscard]] Figures reserved() const;
  void reset_used_high();
  void reset_reserved_high();

 private:
  using Address = std::uintptr_t;
  using Free = std::map<Address, std::size_t>;

  Free::iterator find_room(std::size_t size);

  Memory& memory_;
  const int device_;
  mutable std::mutex mutex_;
  std::map<Address, std::size_t> chunks_;
  Free free_;                              // free ranges never span two chunks
  std::map<Address, std::size_t> blocks_;  // that are in use
  Figures used_;
  Figures reserved_;
};

}  // namespace opacus_memprof::virtual_gpu
