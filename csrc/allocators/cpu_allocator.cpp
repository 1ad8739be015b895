// SPDX-License-Identifier: Apache-2.0
// Wraps c10's CPU allocator, so that the whole profiler works without a GPU.
#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <memory>
#include <optional>
#include <stdexcept>

#include "allocators/profiled_allocator.h"
#include "allocators/reporting.h"

namespace opacus_memprof {

namespace {

constexpr Device kCpu = 0;

// Adds up the reports of c10's CPU memory reporter for each block, independently of our ledger. c10
// keeps the size of a block only while a thread-local listener requests it, so ours is installed
// during each upstream call, and forwards to the previous one (torch.profiler's). The reporter's
// own total is not usable: it includes blocks whose free had no listener, such as blocks whose
// allocation torch.profiler has seen.
//
// In a forked child no listener is installed: c10's reporter takes a mutex for a listener, which
// another thread may have held at the fork, and that thread does not exist in the child.
class MemoryListener final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* pointer, std::int64_t size, std::size_t allocated,
                         std::size_t reserved, c10::Device device) override {
    total += size;
    if (auto* outer = outer_listener; outer != nullptr && outer->memoryProfilingEnabled()) {
      outer->reportMemoryUsage(pointer, size, allocated, reserved, device);
    }
  }
  [[nodiscard]] bool memoryProfilingEnabled() const override { return true; }

  static c10::MemoryReportingInfoBase* current_outer() {
    return dynamic_cast<c10::MemoryReportingInfoBase*>(
        c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE));
  }

  std::atomic<std::int64_t> total{0};
  static inline thread_local c10::MemoryReportingInfoBase* outer_listener = nullptr;
};

const std::shared_ptr<MemoryListener>& listener() {
  static const auto* const instance =
      new std::shared_ptr<MemoryListener>(std::make_shared<MemoryListener>());
  return *instance;
}

class ListenerScope {
 public:
  ListenerScope() {
    if (c10::ThreadLocalDebugInfo::current() == nullptr) {
      MemoryListener::outer_listener = nullptr;
      c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(only_our_listener());
    } else {
      MemoryListener::outer_listener = MemoryListener::current_outer();
      guard_.emplace(c10::DebugInfoKind::PROFILER_STATE, listener());
    }
  }
  ListenerScope(const ListenerScope&) = delete;
  ListenerScope& operator=(const ListenerScope&) = delete;
  ~ListenerScope() {
    if (!guard_) c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(nullptr);
  }

 private:
  // Debug info with our listener only, made once: a guard makes it each time, which takes longer
  // than the allocation. Used if there is no other listener.
  static const std::shared_ptr<c10::ThreadLocalDebugInfo>& only_our_listener() {
    static const auto* const instance = [] {
      const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, listener());
      return new std::shared_ptr<c10::ThreadLocalDebugInfo>(c10::ThreadLocalDebugInfo::current());
    }();
    return *instance;
  }

  std::optional<c10::DebugInfoGuard> guard_;
};

// The upstream of every wrapped block. Set once, because blocks outlive uninstall().
c10::Allocator* upstream = nullptr;
c10::DeleterFnPtr upstream_deleter = nullptr;
std::atomic<std::int64_t> adopted_bytes{0};
std::atomic<std::int64_t> limit{0};  // of cpu_reported_bytes(); 0: none

// Throws torch's OutOfMemoryError, as a device of that size would.
void check_limit(std::size_t size) {
  if (limit.load(std::memory_order_relaxed) == 0) return;
  const std::int64_t room = limit - cpu_reported_bytes();
  TORCH_CHECK_WITH(OutOfMemoryError, static_cast<std::int64_t>(size) <= room,
                   "CPU out of memory. Tried to allocate ", size, " bytes; ", limit.load(),
                   " bytes are allowed, of which ", room, " are free.");
}

void free_block(void* pointer) {
  if (!recorder().is_recording()) {
    upstream_deleter(pointer);
    return;
  }
  report_free(pointer);
  const ListenerScope scope;
  upstream_deleter(pointer);
}

// Frees an adopted block without a listener: c10's reporter never counted it, and would warn of a
// block of unknown size.
void free_adopted(void* pointer) {
  adopted_bytes -= static_cast<std::int64_t>(recorder().size_of(address_of(pointer)));
  report_free(pointer);
  upstream_deleter(pointer);
}

class DelegatingCpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t size) override {
    // Uninstalled, but a storage that is resized asks the allocator that made it.
    const bool uninstalled = c10::GetAllocator(c10::DeviceType::CPU) == upstream;
    if (uninstalled || !recorder().is_recording()) return upstream->allocate(size);
    c10::DataPtr data;
    try {
      check_limit(size);
      const ListenerScope scope;
      data = upstream->allocate(size);
    } catch (...) {
      const std::uint64_t number = recorder().on_oom(size, kCpu, tag_of_failure(size));
      if (limit > 0) recorder().note_upstream_at_failure(number, {.limit = limit});
      throw;
    }
    if (data && data.compare_exchange_deleter(upstream_deleter, &free_block)) {
      report_alloc(data.get(), size, kCpu, 0);
    }
    return data;
  }
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* destination, const void* source, std::size_t count) const override {
    upstream->copy_data(destination, source, count);
  }
  [[nodiscard]] bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return upstream->is_simple_data_ptr(data);
  }
};

class ProfiledCpuAllocator final : public ProfiledAllocator {
 public:
  void install() override {
    c10::Allocator* current = c10::GetAllocator(c10::DeviceType::CPU);
    if (current == &allocator_) return;
    if (upstream == nullptr) {
      if (current->raw_deleter() == nullptr) {
        throw std::runtime_error(
            "the current CPU allocator has no raw deleter, so frees cannot be followed; profile "
            "before the library that replaced torch's own allocator is imported");
      }
      upstream = current;
      upstream_deleter = current->raw_deleter();
    } else if (current != upstream) {
      throw std::runtime_error(
          "the CPU allocator is not the one that was wrapped first; start a new process to profile "
          "with the new one");
    }
    make_current(&allocator_);
  }

  void uninstall() override {
    if (installed()) make_current(upstream);
  }

  [[nodiscard]] bool installed() const override {
    return c10::GetAllocator(c10::DeviceType::CPU) == &allocator_;
  }

  bool adopt(c10::DataPtr& data, std::size_t bytes) override {
    if (upstream == nullptr || data.get_deleter() != upstream_deleter || !data ||
        data.get() != data.get_context() || recorder().has_block(address_of(data.get())) ||
        !data.compare_exchange_deleter(upstream_deleter, &free_adopted)) {
      return false;
    }
    recorder().seed(address_of(data.get()), bytes, kCpu, 0);
    recorder().adopt(address_of(data.get()));
    adopted_bytes += static_cast<std::int64_t>(bytes);
    return true;
  }

  // No allocator statistics on the CPU; the reporter's count is read at snapshots instead.
  void note_peak(PeakId /*peak*/) noexcept override {}

 private:
  // At the lowest priority that c10 accepts, because it ignores later allocators with a lower one.
  // That is the priority of the current allocator, which c10 does not report.
  static void make_current(c10::Allocator* allocator) {
    for (int priority = 0; c10::GetAllocator(c10::DeviceType::CPU) != allocator; ++priority) {
      c10::SetAllocator(c10::DeviceType::CPU, allocator, static_cast<std::uint8_t>(priority));
    }
  }

  DelegatingCpuAllocator allocator_;
};

}  // namespace

ProfiledAllocator& cpu_allocator() {
  static auto* const instance = new ProfiledCpuAllocator;
  return *instance;
}

void cpu_limit(std::int64_t bytes) { limit = bytes; }

std::int64_t cpu_reported_bytes() { return listener()->total + adopted_bytes; }

}  // namespace opacus_memprof
