// SPDX-License-Identifier: Apache-2.0
// Adds the purposes of blocks to torch's own memory history. If a program records one
// (torch.cuda.memory._record_memory_history), torch's snapshot and memory_viz show our category and
// module as `user_metadata`, after the program's own metadata. Needs torch 2.15 or newer.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <cstdint>
#include <string>

namespace opacus_memprof {

// Metadata for allocations of this thread in upstream, while it exists. Does nothing unless
// `recorded`. `workspace`: the block is lent to a library, see report_alloc.
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

// Adds a block's new category or module to the history.
void annotate_history(c10::cuda::CUDACachingAllocator::CUDAAllocator& upstream, const void* pointer,
                      std::uint8_t category, std::uint16_t module) noexcept;

}  // namespace opacus_memprof
