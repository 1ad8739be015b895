// SPDX-License-Identifier: Apache-2.0
// Installs the delegating allocator instead of torch's, and removes it again, at any time.
#include "allocators/cuda_allocator.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <optional>
#include <shared_mutex>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "allocators/cuda_call_site.h"
#include "allocators/cuda_delegating.h"
#include "allocators/cuda_history.h"
#include "allocators/reporting.h"

// CUDAContextLight.h includes headers of CUDA libraries that some installations lack.
#if defined(OPACUS_MEMPROF_HAS_WorkspaceMapWithMutex) && __has_include(<cusolverDn.h>) && \
    __has_include(<cusparse.h>) && __has_include(<cublasLt.h>)
#include <ATen/cuda/CUDAContextLight.h>
#define OPACUS_MEMPROF_READS_WORKSPACES
#endif

namespace opacus_memprof {

namespace {

c10::DeviceIndex device_index(Device device) noexcept {
  return static_cast<c10::DeviceIndex>(device - 1);
}

#ifdef OPACUS_MEMPROF_READS_WORKSPACES
const void* pointer_of(const c10::DataPtr& workspace) { return workspace.get(); }
template <typename Size>  // newer versions of torch keep it with its size
const void* pointer_of(const std::pair<c10::DataPtr, Size>& workspace) {
  return workspace.first.get();
}
#endif

// Retags workspaces of cuBLAS that were allocated before install(): one for each thread and stream
// that multiplied matrices, about 32 MiB each.
void retag_seeded_workspaces() {
#ifdef OPACUS_MEMPROF_READS_WORKSPACES
  for (auto* workspaces : {&at::cuda::cublas_handle_stream_to_workspace(),
                           &at::cuda::cublaslt_handle_stream_to_workspace()}) {
    const std::shared_lock guard(workspaces->mutex);
    for (const auto& [user, workspace] : workspaces->map) {
      recorder().retag(address_of(pointer_of(workspace)),
                       static_cast<std::uint8_t>(Category::library_workspace), kKeep16);
    }
  }
#endif
}

class ProfiledCudaAllocator final : public ProfiledAllocator {
 public:
  void install() override {
    DelegatingCudaAllocator& ours = delegating();
    if (installed()) return;
    if (cca::get() != ours.upstream() && cca::get() != &ours) {
      throw std::runtime_error("the current CUDA allocator ('" + cca::name() +
                               "') is not the one that was wrapped first ('" +
                               ours.upstream()->name() +
                               "'): another library replaced it; start a new process and install "
                               "opacus-memprof after that library");
    }
    ours.look_for_history();
    ours.reserved().begin(*ours.upstream());
    forget_what_has_gone();
    // First of all, so that no block is missed: allocations of other threads meanwhile are
    // reported, and reported blocks are not seeded.
    ours.set_reporting(true);
    cca::allocator.store(&ours);
    c10::SetAllocator(c10::DeviceType::CUDA, &ours);
    seed();
    // A thread may have looked up torch's allocator before, and have allocated from it during the
    // search. The search takes longer than that call had left.
    seed();
  }

  void uninstall() override {
    if (!installed()) return;
    note_reserved();
    delegating_->set_reporting(false);
    leave_if_unused();
  }

  [[nodiscard]] bool installed() const override {
    return delegating_ != nullptr && delegating_->is_reporting() && cca::get() == delegating_;
  }

  void note_free_after_uninstall() noexcept {
    if (awaited_frees_.fetch_sub(1) == 1) leave_if_unused();
  }

  void note_alloc_after_uninstall() noexcept {
    if (replace(delegating_->upstream(), delegating_)) awaited_frees_ = 1;
  }

  bool adopt(c10::DataPtr& data, std::size_t bytes) override {
    if (!installed() || !data) return false;
    if (data.get_deleter() == delegating_->raw_deleter()) return false;  // nearly always
    const bool adopted = data.compare_exchange_deleter(delegating_->upstream()->raw_deleter(),
                                                       delegating_->raw_deleter());
    if (adopted) {
      // A block that existed when the ledger was seeded is known already.
      recorder().seed(address_of(data.get()), bytes, static_cast<Device>(1 + data.device().index()),
                      0);
      recorder().adopt(address_of(data.get()));
    }
    return adopted;
  }

  void annotate(const void* pointer, std::uint8_t category,
                std::uint16_t module) noexcept override {
    if (delegating_ == nullptr || !delegating_->records_history()) return;
    annotate_history(*delegating_->upstream(), pointer, category, module);
  }

  void note_peak(PeakId peak) noexcept override {
    std::int64_t requested = -1;
    std::int64_t allocated = -1;
    std::int64_t reserved = -1;
    try {
      constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
      const auto stats = delegating().upstream()->getDeviceStats(device_index(device_of(peak)));
      requested = stats.requested_bytes[kAll].current;
      allocated = stats.allocated_bytes[kAll].current;
      reserved = stats.reserved_bytes[kAll].current;
    } catch (...) {
      // An upstream without statistics (a plug-in allocator): the figures stay unknown.
    }
    recorder().note_upstream_at_peak(peak, requested, allocated, reserved);
  }

  void note_reserved() noexcept override {
    if (installed()) delegating_->reserved().ask(*delegating_->upstream());
  }

  // Made on first use and never destroyed, because tensors keep pointers to it.
  DelegatingCudaAllocator& delegating() {
    if (delegating_ == nullptr) {
      if (cca::get()->raw_deleter() == nullptr) {
        throw std::runtime_error("the current CUDA allocator ('" + cca::name() +
                                 "') has no raw deleter, so frees cannot be followed; install "
                                 "opacus-memprof before it is replaced");
      }
      find_libtorch_cpu();
      delegating_ = new DelegatingCudaAllocator(cca::get());
    }
    return *delegating_;
  }

  std::int64_t refresh(c10::DeviceIndex device) {
    if (delegating_ == nullptr) return 0;  // a program that uses a GPU, and profiles the CPU only
    std::int64_t pending = 0;
    std::unordered_map<std::uint64_t, std::uint64_t> alive;  // address → bytes
    for_each_block(*delegating_->upstream(),
                   [&](std::uint64_t address, const auto& block, c10::DeviceIndex owner) {
                     if (owner != device) return;
                     if (block.allocated) alive[address] = block.requested_size;
                     if (block.active && !block.allocated) {
                       pending += static_cast<std::int64_t>(block.requested_size);
                     }
                   });
    for (const Block& known : recorder().live_blocks()) {
      if (!known.seeded || known.device != static_cast<Device>(1 + device)) continue;
      const auto found = alive.find(known.address);
      if (found != alive.end() && found->second == known.size()) continue;
      note_peak_ended_by_free(
          recorder().forget({known.address, known.serial}, this_thread().phase()));
      // Another block by now, from a call that had begun before install().
      if (found != alive.end()) recorder().seed(known.address, found->second, known.device, 0);
    }
    return pending;
  }

 private:
  // Restores torch's allocator if no block that ours has reported is live. If some are, checks
  // again after as many frees, so that a free needs no search.
  void leave_if_unused() noexcept {
    for (;;) {
      awaited_frees_ = kMany;  // frees count from here on, including those during the search
      std::int64_t left = reported_blocks();
      if (left == 0 && !delegating_->is_reporting() &&
          replace(delegating_, delegating_->upstream())) {
        delegating_->forget_pools();
        // A thread that has reported since then found ours installed, and left the check to us.
        left = reported_blocks();
        if (left == 0 || !replace(delegating_->upstream(), delegating_)) return;
      }
      if (awaited_frees_.fetch_add(left - kMany) + left - kMany > 0) return;
      if (delegating_->is_reporting() || cca::get() != delegating_) return;
    }
  }

  static bool replace(cca::CUDAAllocator* current, cca::CUDAAllocator* next) noexcept {
    if (!cca::allocator.compare_exchange_strong(current, next)) return false;
    c10::SetAllocator(c10::DeviceType::CUDA, next);
    return true;
  }

  // The number of live blocks whose frees will be reported.
  static std::int64_t reported_blocks() noexcept {
    try {
      return std::ranges::count_if(recorder().live_blocks(), [](const Block& block) {
        return block.device != 0 && !block.seeded;
      });
    } catch (const std::bad_alloc&) {
      return 1;  // checked again at the next free
    }
  }

  static constexpr std::int64_t kMany = std::int64_t{1} << 62U;
  std::atomic<std::int64_t> awaited_frees_{kMany};  // after uninstall(), until the next search

  struct Found {
    std::uint64_t bytes;
    c10::DeviceIndex device;
  };

  // Returns the blocks that upstream has handed out, by address; nothing if it has no snapshots.
  std::optional<std::unordered_map<std::uint64_t, Found>> handed_out() {
    std::unordered_map<std::uint64_t, Found> alive;
    if (!delegating_->upstream()->initialized()) return std::nullopt;
    try {
      for_each_block(*delegating_->upstream(),
                     [&](std::uint64_t address, const auto& block, c10::DeviceIndex device) {
                       if (block.allocated) alive.insert({address, {block.requested_size, device}});
                     });
    } catch (const c10::Error&) {
      return std::nullopt;
    }
    return alive;
  }

  // Blocks in the ledger from an earlier install may have been freed since then, and their
  // addresses reused.
  void forget_what_has_gone() {
    const std::vector<Block> known = recorder().live_blocks();
    if (std::ranges::all_of(known, [](const Block& block) { return block.device == 0; })) return;
    const auto alive = handed_out();
    if (!alive) return;
    for (const Block& block : known) {
      if (block.device == 0) continue;
      const auto found = alive->find(block.address);
      const bool same = found != alive->end() && found->second.bytes == block.size();
      if (block.seeded || !same) recorder().forget({block.address, block.serial}, Phase::idle);
    }
  }

  // Earlier tensors have the native deleter, so their frees are not seen (refresh detects them).
  // Without snapshots they stay unknown and show as a remainder.
  void seed() {
    const auto alive = handed_out();
    if (!alive) return;
    for (const auto& [address, found] : *alive) {
      recorder().seed(address, found.bytes, static_cast<Device>(1 + found.device), 0);
    }
    retag_seeded_workspaces();
  }

  DelegatingCudaAllocator* delegating_ = nullptr;
};

ProfiledCudaAllocator& profiled_cuda_allocator() {
  static auto* const instance = new ProfiledCudaAllocator;
  return *instance;
}

}  // namespace

ProfiledAllocator& cuda_allocator() { return profiled_cuda_allocator(); }

c10::cuda::CUDACachingAllocator::CUDAAllocator* delegating_cuda_allocator() {
  DelegatingCudaAllocator& ours = profiled_cuda_allocator().delegating();
  if (cca::get() != &ours) ours.set_reporting(true);  // the caller is about to install it
  return &ours;
}

void note_free_after_uninstall() noexcept { profiled_cuda_allocator().note_free_after_uninstall(); }

void note_alloc_after_uninstall() noexcept {
  profiled_cuda_allocator().note_alloc_after_uninstall();
}

std::string cuda_current_name() {
  return profiled_cuda_allocator().installed() ? "opacus_memprof over " + cca::name() : cca::name();
}

std::int64_t cuda_refresh(int device) {
  return profiled_cuda_allocator().refresh(static_cast<c10::DeviceIndex>(device));
}

}  // namespace opacus_memprof
