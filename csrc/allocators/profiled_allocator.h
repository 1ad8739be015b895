// SPDX-License-Identifier: Apache-2.0
// The contract of a device type's allocator under the profiler. install() installs one that
// delegates to torch's own, and reports calls to the recorder; uninstall() restores torch's.
// Neither is ever destroyed, because tensors keep pointers to them.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/recorder.h"

namespace opacus_memprof {

class ProfiledAllocator {
 public:
  virtual ~ProfiledAllocator() = default;

  // Both are idempotent. Throw std::runtime_error with one sentence if this is not possible.
  virtual void install() = 0;
  virtual void uninstall() = 0;
  [[nodiscard]] virtual bool installed() const = 0;

  // Adopts a block that was allocated before install(), so that its free is reported; false if it
  // is not such a block.
  virtual bool adopt(c10::DataPtr& data, std::size_t bytes) = 0;
  // Tells upstream a block's new category and module, if it keeps a history with room for them.
  virtual void annotate(const void* /*pointer*/, std::uint8_t /*category*/,
                        std::uint16_t /*module*/) noexcept {}
  // Asks upstream for its counts, for the peak that has just been closed.
  virtual void note_peak(PeakId peak) noexcept = 0;
  // Asks upstream for what it has reserved since it was last asked.
  virtual void note_reserved() noexcept {}
};

ProfiledAllocator& cpu_allocator();
// In a build without CUDA, install() throws the error of throw_no_cuda().
ProfiledAllocator& cuda_allocator();

// nullptr for a device type that is not profiled.
ProfiledAllocator* allocator_of(c10::DeviceType type);

// Returns the peaks of all devices since reset_peaks(). Closes peaks that no free has ended, and
// asks the allocators for their counts there.
std::vector<Recorder::DevicePeak> closed_peaks();
void reset_peaks() noexcept;

// The live bytes according to c10's CPU memory reporter: allocations since install, and adopted
// blocks.
std::int64_t cpu_reported_bytes();

// Makes the CPU run out of memory beyond so many of these bytes, as a device of that size would; 0
// removes the limit. Running out of memory can thus be tested on a machine without a GPU.
void cpu_limit(std::int64_t bytes);

// The name of torch's current CUDA allocator, also if it runs under ours; "" without CUDA.
std::string cuda_current_name();

// Asks the wrapped CUDA allocator which blocks exist, and drops seeded blocks that are gone.
// Returns the bytes that were freed but wait for a side stream. Throws c10::Error if it keeps no
// snapshot.
std::int64_t cuda_refresh(int device);

// In a build without CUDA: throws std::runtime_error with one sentence.
[[noreturn]] void throw_no_cuda();

}  // namespace opacus_memprof
