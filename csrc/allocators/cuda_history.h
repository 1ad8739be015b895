// SPDX-License-Identifier: Apache-2.0
// Has torch's own memory history say what blocks are for: where a program records one
// (torch.cuda.memory._record_memory_history), torch's snapshot and memory_viz then show our
// category and module as `user_metadata`, behind what the program itself has set. From torch 2.15
// on; before, there is no place for it.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <cstdint>
#include <string>

namespace opacus_memprof {

// Metadata of what this thread allocates upstream, while it exists. Does nothing unless `recorded`.
// `workspace`: the block is lent to a library, as report_alloc is told.
class HistoryTag {
 public:
  HistoryTag(c10::cuda::CUDACachingAllocator::CUDAAllocator& upstream, bool recorded,
             bool workspace)
      : upstream_(recorded ? &upstream : nullptr) {
    if (upstream_ != nullptr) [[unlikely]]
      set(workspace);
  }
  HistoryTag(const HistoryTag&) = delete;
  HistoryTag& operator=(const HistoryTag&) = delete;
  ~HistoryTag() {
    if (upstream_ != nullptr) [[unlikely]]
      restore();
  }

 private:
  void set(bool workspace) noexcept;
  void restore() noexcept;

  c10::cuda::CUDACachingAllocator::CUDAAllocator* upstream_;
  std::string original_;
};

// Adds to the history that a block has got another category or module.
void annotate_history(c10::cuda::CUDACachingAllocator::CUDAAllocator& upstream, const void* pointer,
                      std::uint8_t category, std::uint16_t module) noexcept;

}  // namespace opacus_memprof
