// SPDX-License-Identifier: Apache-2.0
// Addresses of device memory, given out as the driver does.
//
// The order matters: of free blocks that serve a request equally well torch's caching allocator
// takes the one with the lowest address, and so splits and reserves other segments under another
// order. What is done here was read from the addresses of all segments of 63 trainings on an H200
// with driver 580 (CUDA 13):
//
// - Addresses come from regions. A request takes the lowest gap that is large enough in the newest
//   region that has one.
// - Where no region has one there is a new region, of as many 32 MiB as are needed, below all the
//   others.
// - The context has a region of its own with two gaps. When the first kernel is launched a large
//   part of it becomes free, and the code of the kernels takes some addresses. Where cuDNN comes
//   before the first kernel it takes them earlier.
// - A handle of cuBLAS takes 64 MiB.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace opacus_memprof::virtual_gpu {

// Not thread safe. Sizes are multiples of kPage.
class AddressSpace {
 public:
  // Nothing of `size` exists until it is touched; 0 addresses where the kernel has not that many.
  explicit AddressSpace(std::size_t size);

  // Readable and writable addresses, which read as zero; nullptr where there are not that many
  // left.
  void* take(std::size_t size);
  // Drops what was written there. A region without anything in it goes.
  void give_back(void* address, std::size_t size);

  // What the driver itself takes and frees: at the first kernel, of which later ones change
  // nothing, and for handles of cuBLAS and cuDNN.
  void launch_kernel();
  void create_cublas_handle();
  void create_cudnn_handle();

 private:
  struct Region {
    std::uintptr_t start = 0;
    std::size_t size = 0;
    std::map<std::uintptr_t, std::size_t> gaps;  // by start; neighbours are joined
  };

  std::uintptr_t find(std::size_t size);                 // 0 where there is none left
  std::uintptr_t new_region_at(std::size_t size) const;  // likewise

  std::uintptr_t low_ = 0;
  std::uintptr_t high_ = 0;
  std::uintptr_t context_ = 0;   // the context's own region
  std::vector<Region> regions_;  // in the order in which they were made
  bool launched_ = false;
  bool code_loaded_ = false;
};

}  // namespace opacus_memprof::virtual_gpu
