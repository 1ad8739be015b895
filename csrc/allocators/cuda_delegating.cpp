// SPDX-License-Identifier: Apache-2.0
#include "allocators/cuda_delegating.h"

#include <c10/cuda/CUDAFunctions.h>

#include <unordered_map>

#include "allocators/cuda_allocator.h"
#include "allocators/cuda_call_site.h"
#include "allocators/cuda_failure.h"
#include "allocators/cuda_history.h"
#include "allocators/cuda_streams.h"
#include "allocators/reporting.h"

namespace opacus_memprof {

namespace {

// A deleter is a plain function, so its data is global: there is one wrapped allocator per process.
c10::DeleterFnPtr upstream_deleter = nullptr;
std::atomic<bool> reports{true};  // false from uninstall() to the next install()

Device device_number(c10::DeviceIndex index) noexcept { return static_cast<Device>(1 + index); }

void report_freed_block(const void* pointer) noexcept {
  note_peak_ended_by_free(report_free(pointer));
}

// Native allocate() hands out a deleter that calls the native allocator directly; with it we would
// never see a free.
[[gnu::hot, gnu::flatten]] void free_block(void* pointer) {
  recorder().prefetch();
  __builtin_prefetch(recorder().prefetch_address(address_of(pointer)), 1);
  report_freed_block(pointer);
  upstream_deleter(pointer);
  if (!reports.load(std::memory_order_relaxed)) [[unlikely]]
    note_free_after_uninstall();
}

void report_new_block(c10::DataPtr& data, std::size_t size, const void* return_address) {
  if (!data || !data.compare_exchange_deleter(upstream_deleter, &free_block)) return;
  __builtin_prefetch(recorder().prefetch_address(address_of(data.get())), 1);
  const c10::DeviceIndex device = data.device().index();
  const std::uint8_t stream =
      recorder().writes_events() ? current_stream_id(device) : std::uint8_t{0};
  report_alloc(data.get(), size, device_number(device), stream,
               is_library_workspace(return_address));
  if (!reports.load(std::memory_order_relaxed)) [[unlikely]]
    note_alloc_after_uninstall();
}

}  // namespace

DelegatingCudaAllocator::DelegatingCudaAllocator(cca::CUDAAllocator* upstream)
    : upstream_(upstream) {
  upstream_deleter = upstream->raw_deleter();
}

bool DelegatingCudaAllocator::is_reporting() const noexcept {
  return reports.load(std::memory_order_relaxed);
}

void DelegatingCudaAllocator::set_reporting(bool on) noexcept { reports = on; }

bool DelegatingCudaAllocator::passes_on() const noexcept {
  return !is_reporting() && open_pools_.load(std::memory_order_relaxed) == 0;
}

c10::DataPtr DelegatingCudaAllocator::allocate(size_t size) {
  const void* return_address = __builtin_return_address(0);
  if (!is_reporting() || records_history()) [[unlikely]]
    return allocate_rarely(size, return_address);
  return allocate_and_report(size, return_address);
}

template <typename Allocate>
inline auto DelegatingCudaAllocator::watch(size_t size, Allocate allocate) -> decltype(allocate()) {
  reserved_.note_allocation(*upstream_);
  return report_oom_of(*upstream_, size, allocate);
}

// A separate function, so that the result of upstream is constructed where the caller wants it.
inline c10::DataPtr DelegatingCudaAllocator::allocate_and_report(size_t size,
                                                                 const void* return_address) {
  recorder().prefetch();
  c10::DataPtr data = watch(size, [&] { return upstream_->allocate(size); });
  report_new_block(data, size, return_address);
  return data;
}

c10::DataPtr DelegatingCudaAllocator::allocate_rarely(size_t size, const void* return_address) {
  if (passes_on()) return upstream_->allocate(size);
  const HistoryTag history_tag(*upstream_, records_history(), is_library_workspace(return_address));
  return allocate_and_report(size, return_address);
}

#ifdef OPACUS_MEMPROF_HAS_allocateWithAddress
c10::DataPtr DelegatingCudaAllocator::allocateWithAddress(size_t size, void* address) {
  if (passes_on()) return upstream_->allocateWithAddress(size, address);
  const void* return_address = __builtin_return_address(0);
  const HistoryTag history_tag(*upstream_, records_history(), is_library_workspace(return_address));
  c10::DataPtr data = watch(size, [&] { return upstream_->allocateWithAddress(size, address); });
  report_new_block(data, size, return_address);
  return data;
}
#endif

c10::DeleterFnPtr DelegatingCudaAllocator::raw_deleter() const { return &free_block; }

void* DelegatingCudaAllocator::raw_alloc(size_t size) {
  if (passes_on()) return upstream_->raw_alloc(size);
  const c10::DeviceIndex device = c10::cuda::current_device();
  const bool workspace = is_library_workspace(__builtin_return_address(0));
  const HistoryTag history_tag(*upstream_, records_history(), workspace);
  void* pointer = watch(size, [&] { return upstream_->raw_alloc(size); });
  report_alloc(pointer, size, device_number(device), current_stream_id(device), workspace);
  if (!is_reporting()) note_alloc_after_uninstall();
  return pointer;
}

void* DelegatingCudaAllocator::raw_alloc_with_stream(size_t size, cudaStream_t stream) {
  if (passes_on()) return upstream_->raw_alloc_with_stream(size, stream);
  const c10::DeviceIndex device = c10::cuda::current_device();
  const bool workspace = is_library_workspace(__builtin_return_address(0));
  const HistoryTag history_tag(*upstream_, records_history(), workspace);
  void* pointer = watch(size, [&] { return upstream_->raw_alloc_with_stream(size, stream); });
  report_alloc(pointer, size, device_number(device), stream_id(stream), workspace);
  if (!is_reporting()) note_alloc_after_uninstall();
  return pointer;
}

void DelegatingCudaAllocator::raw_delete(void* pointer) {
  report_freed_block(pointer);
  upstream_->raw_delete(pointer);
  if (!is_reporting()) note_free_after_uninstall();
}

void DelegatingCudaAllocator::recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) {
  if (data.get_deleter() != &free_block) {
    upstream_->recordStream(data, stream);
    return;
  }
  // Native recordStream returns silently unless the deleter is its own.
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
  for (void* pointer : delta.ptrs_freed) {
    report_freed_block(pointer);
    if (!is_reporting()) note_free_after_uninstall();
  }
  if (delta.dataptrs_allocd.empty()) return delta;
  // Upstream made these blocks live again by itself: only it knows the requested bytes.
  std::unordered_map<std::uint64_t, std::size_t> requested;
  for_each_block(*upstream_, [&](std::uint64_t address, const auto& block, c10::DeviceIndex) {
    if (block.allocated) requested[address] = block.requested_size;
  });
  for (c10::DataPtr& data : delta.dataptrs_allocd) {
    report_new_block(data, requested[address_of(data.get())], __builtin_return_address(0));
  }
  return delta;
}

}  // namespace opacus_memprof
