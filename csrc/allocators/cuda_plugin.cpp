// SPDX-License-Identifier: Apache-2.0
// Plain C entry points for torch.cuda.memory.CUDAPluggableAllocator, for programs that cannot use
// an allocator in another way. torch loses many features with any such allocator (docs/python.md,
// "The plug-in route"), but not with opacus_memprof.allocator().
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <sys/types.h>

#include "allocators/cuda_allocator.h"
#include "allocators/cuda_failure.h"
#include "allocators/cuda_streams.h"
#include "allocators/reporting.h"

namespace opacus_memprof {

namespace {

namespace cca = c10::cuda::CUDACachingAllocator;

// The allocator that was current when the library was loaded; later it is the plug-in, which calls
// us.
cca::CUDAAllocator* const native = cca::get();

cca::CUDAAllocator& ready_native() {
  if (!native->initialized()) native->init(c10::cuda::device_count());
  return *native;
}

}  // namespace

}  // namespace opacus_memprof

#define OPACUS_MEMPROF_API extern "C" __attribute__((visibility("default")))

OPACUS_MEMPROF_API void* opacus_memprof_malloc(ssize_t size, int device, cudaStream_t stream) {
  using namespace opacus_memprof;
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  const auto bytes = static_cast<std::size_t>(size);
  cca::CUDAAllocator& upstream = ready_native();
  void* pointer =
      report_oom_of(upstream, bytes, [&] { return upstream.raw_alloc_with_stream(bytes, stream); });
  report_alloc(pointer, bytes, static_cast<Device>(1 + device), stream_id(stream));
  return pointer;
}

OPACUS_MEMPROF_API void opacus_memprof_free(void* pointer, ssize_t /*size*/, int /*device*/,
                                            cudaStream_t /*stream*/) {
  using namespace opacus_memprof;
  note_peak_ended_by_free(report_free(pointer));
  native->raw_delete(pointer);
}
