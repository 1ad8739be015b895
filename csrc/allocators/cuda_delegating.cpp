// SPDX-License-Identifier: Apache-2.0
#include "allocators/cuda_delegating.h"

#include <c10/cuda/CUDAFunctions.h>

#include <unordered_map>

#include "allocators/cuda_allocator.h"
#include "allocators/cuda_call_site.h"
#include "allocators/cuda_failure.h"
#include "allocators/cuda_streams.h"
#include "allocators/reporting.h"

namespace opacus_memprof {

namespace {

// A deleter is a plain function, so what it needs is global: one wrapped allocator a process.
c10::DeleterFnPtr upstream_deleter = nullptr;

Device device_number(c10::DeviceIndex index) noexcept { return static_cast<Device>(1 + index); }

[[gnu::hot]] void forget(const void* pointer) noexcept {
  note_peak_ended_by_free(report_free(pointer));
}

// Native allocate() hands out a deleter that calls the native allocator directly; with it we would
// never see a free.
[[gnu::hot]] void free_block(void* pointer) {
  recorder().prefetch();
  __builtin_prefetch(recorder().place(address_of(pointer)), 1);
  forget(pointer);
  upstream_deleter(pointer);
}

// What `allocate` returns; a request that cannot be met is an event, and stays torch's error. Other
// errors are of earlier work, a kernel's above all, which the allocation merely came upon.
template <typename Allocate>
auto or_report_oom(cca::CUDAAllocator* upstream, std::size_t size, Allocate allocate)
    -> decltype(allocate()) {
  try {
    return allocate();
  } catch (const c10::OutOfMemoryError&) {
    c10::DeviceIndex device = 0;  // the failed call made its device current
    if (c10::cuda::GetDevice(&device) == cudaSuccess) {
      const std::uint64_t number =
          recorder().on_oom(size, device_number(device), tag_of_allocation());
      recorder().note_upstream_at_failure(number, upstream_at_failure(*upstream, device));
    }
    throw;
  }
}

[[gnu::hot]] void remember(c10::DataPtr& data, std::size_t size, const void* return_address) {
  if (!data || !data.compare_exchange_deleter(upstream_deleter, &free_block)) return;
  __builtin_prefetch(recorder().place(address_of(data.get())), 1);
  const c10::DeviceIndex device = data.device().index();
  const std::uint8_t stream = recorder().detailed() ? current_stream_id(device) : std::uint8_t{0};
  report_alloc(data.get(), size, device_number(device), stream,
               is_library_workspace(return_address));
}

}  // namespace

DelegatingCudaAllocator::DelegatingCudaAllocator(cca::CUDAAllocator* upstream)
    : upstream_(upstream) {
  upstream_deleter = upstream->raw_deleter();
}

c10::DataPtr DelegatingCudaAllocator::allocate(size_t size) {
  if (retired()) [[unlikely]]
    return upstream_->allocate(size);
  recorder().prefetch();
  c10::DataPtr data = or_report_oom(upstream_, size, [&] { return upstream_->allocate(size); });
  remember(data, size, __builtin_return_address(0));
  return data;
}

#ifdef OPACUS_MEMPROF_HAS_allocateWithAddress
c10::DataPtr DelegatingCudaAllocator::allocateWithAddress(size_t size, void* address) {
  c10::DataPtr data = upstream_->allocateWithAddress(size, address);
  if (!retired()) remember(data, size, __builtin_return_address(0));
  return data;
}
#endif

c10::DeleterFnPtr DelegatingCudaAllocator::raw_deleter() const { return &free_block; }

void* DelegatingCudaAllocator::raw_alloc(size_t size) {
  const c10::DeviceIndex device = c10::cuda::current_device();
  void* pointer = or_report_oom(upstream_, size, [&] { return upstream_->raw_alloc(size); });
  report_alloc(pointer, size, device_number(device), current_stream_id(device),
               is_library_workspace(__builtin_return_address(0)));
  return pointer;
}

void* DelegatingCudaAllocator::raw_alloc_with_stream(size_t size, cudaStream_t stream) {
  const c10::DeviceIndex device = c10::cuda::current_device();
  void* pointer = or_report_oom(upstream_, size,
                                [&] { return upstream_->raw_alloc_with_stream(size, stream); });
  report_alloc(pointer, size, device_number(device), stream_id(stream),
               is_library_workspace(__builtin_return_address(0)));
  return pointer;
}

void DelegatingCudaAllocator::raw_delete(void* pointer) {
  forget(pointer);
  upstream_->raw_delete(pointer);
}

void DelegatingCudaAllocator::recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) {
  if (data.get_deleter() != &free_block) {
    upstream_->recordStream(data, stream);
    return;
  }
  // Native recordStream returns without a word unless the deleter is its own.
  c10::DataPtr native(data.get(), data.get_context(), upstream_deleter, data.device());
  try {
    upstream_->recordStream(native, stream);
  } catch (...) {
    static_cast<void>(native.release_context());
    throw;
  }
  static_cast<void>(native.release_context());  // the block still belongs to `data`
}

void DelegatingCudaAllocator::recordStream(const c10::DataPtr& data, c10::Stream stream) {
  recordStream(data, c10::cuda::CUDAStream(stream));
}

cca::CheckpointDelta DelegatingCudaAllocator::setCheckpointPoolState(
    c10::DeviceIndex device, std::shared_ptr<cca::AllocatorState> state) {
  cca::CheckpointDelta delta = upstream_->setCheckpointPoolState(device, std::move(state));
  for (void* pointer : delta.ptrs_freed) forget(pointer);
  if (delta.dataptrs_allocd.empty()) return delta;
  // Upstream made these blocks alive again by itself: it alone knows the bytes that were asked for.
  std::unordered_map<std::uint64_t, std::size_t> requested;
  for_each_block(*upstream_, [&](std::uint64_t address, const auto& block, c10::DeviceIndex) {
    if (block.allocated) requested[address] = block.requested_size;
  });
  for (c10::DataPtr& data : delta.dataptrs_allocd) {
    remember(data, requested[address_of(data.get())], __builtin_return_address(0));
  }
  return delta;
}

}  // namespace opacus_memprof
