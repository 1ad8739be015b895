// SPDX-License-Identifier: Apache-2.0
// The contract of a device type's allocator under the profiler: install() puts one that delegates
// to torch's own in its place, and reports what passes to the recorder; uninstall() puts torch's
// back. Neither is ever destroyed: tensors keep pointers to them.
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

  // Both are idempotent. Throw std::runtime_error with one sentence where it cannot be done.
  virtual void install() = 0;
  virtual void uninstall() = 0;
  [[nodiscard]] virtual bool installed() const = 0;

  // Takes over a block that was allocated before install(), so that its free is reported; false if
  // it is not such a block.
  virtual bool adopt(c10::DataPtr& data, std::size_t bytes) = 0;
  // Tells upstream of a block's new category and module, where it keeps a history that has room.
  virtual void annotate(const void* /*pointer*/, std::uint8_t /*category*/,
                        std::uint16_t /*module*/) noexcept {}
  // Asks upstream what it counts, for the peak that has just been closed.
  virtual void note_peak(PeakId peak) noexcept = 0;
};

ProfiledAllocator& cpu_allocator();
// In a build without CUDA, install() throws the sentence of throw_no_cuda().
ProfiledAllocator& cuda_allocator();

// nullptr for a type of device that is not profiled.
ProfiledAllocator* allocator_of(c10::DeviceType type);

// The peaks of all devices. Closes those that no free has ended, and asks the allocators what they
// count there.
std::vector<Recorder::DevicePeak> closed_peaks();

// The bytes that are live by the count of c10's CPU memory reporter: what was allocated since
// install, and the blocks that were adopted.
std::int64_t cpu_reported_bytes();

// The CPU runs out of memory beyond so many of these bytes, as a device of that size would; 0 lifts
// the limit. So a machine without a GPU can rehearse running out of memory.
void cpu_limit(std::int64_t bytes);

// The name of torch's current CUDA allocator, and whether it runs under ours; "" without CUDA.
std::string cuda_current_name();

// Asks the wrapped CUDA allocator which blocks exist: drops seeded ones that are gone. Returns the
// bytes that were freed but wait for a side stream. Throws c10::Error if it keeps no snapshot.
std::int64_t cuda_refresh(int device);

// Of a build without CUDA: throws std::runtime_error with one sentence.
[[noreturn]] void throw_no_cuda();

}  // namespace opacus_memprof
