// SPDX-License-Identifier: Apache-2.0
#include "virtual_values/intercept.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "virtual_values/call.h"
#include "virtual_values/copy.h"
#include "virtual_values/counts.h"
#include "virtual_values/execute.h"
#include "virtual_values/graphs.h"
#include "virtual_values/operation.h"
#include "virtual_values/outside.h"
#include "virtual_values/tensors.h"

namespace opacus_memprof::virtual_values {
namespace {

constexpr c10::DispatchKey kKey = c10::DispatchKey::Fake;

// CUDA kernels that count on the device read the count from memory that they have just got, by
// copies that are not seen here. Where nothing computes it, it must not be what an earlier block
// has left.
constexpr std::size_t kCounters = 4096;

void on_allocator_event(const c10::CachingDeviceAllocator::TraceEntry& entry) {
  if (entry.action_ != c10::CachingDeviceAllocator::TraceEntry::ALLOC) return;
  const Span span{entry.addr_, entry.addr_ + entry.size_};
  note_block(span);
  const auto begin = [span] {
    ranges().reset(span);
    if (span.size() <= kCounters) std::memset(bytes_at(span.begin), 0, span.size());
  };
  // While a graph is captured, its pool still holds what the first replay may read.
  if (!capture_allocation(entry.stream_, begin)) begin();
}

// The allocator takes a listener only when it has been initialized, which the first CUDA tensor
// does. Its first block is new, so that nothing is missed.
void follow_allocator() {
  static std::atomic<bool> followed = false;
  if (followed.load(std::memory_order_relaxed)) return;
  auto* const allocator = c10::cuda::CUDACachingAllocator::get();
  if (allocator == nullptr || !allocator->initialized() || followed.exchange(true)) return;
  try {
    allocator->attachAllocatorTraceTracker(&on_allocator_event);
  } catch (const std::exception&) {
    // cudaMallocAsync has no listeners: what operators give is noted then, and what they do not
    // give is not.
  }
}

// The operator of the program in which others are called, for the counts.
thread_local const Operation* outermost = nullptr;
// The lowest state of what the operators in it have read on the host. What was not computed does
// not matter if the outermost one is executed afterwards: its CUDA kernel may read what it has
// itself written past the dispatcher.
thread_local State read_within = State::known;
// It goes into a CUDA graph, and what it calls is a part of it.
thread_local bool captured = false;

class Within {
 public:
  explicit Within(const Operation& operation) : first_(outermost == nullptr) {
    if (!first_) return;
    outermost = &operation;
    read_within = State::known;
  }
  Within(const Within&) = delete;
  Within& operator=(const Within&) = delete;
  ~Within() {
    if (!first_) return;
    outermost = nullptr;
    captured = false;
  }
  [[nodiscard]] bool first() const { return first_; }

 private:
  bool first_;
};

std::string name_of(const Operation& operation) {
  return operation.kind == Kind::item ? "aten::item" : operation.name;
}

// The host has read something in this operator that is not known.
void count_read(const Operation& operation, State state) {
  if (state == State::alike) return count_unknown_read(name_of(operation), state);
  // Kernels that count on the device have been counted by what they read.
  if (operation.counts_on_device) return;
  if (operation.dynamic_shape) {
    count_assumed_shape(operation.name);
  } else {
    count_unknown_read(name_of(operation));
  }
}

void after_fresh(const c10::IValue& result, bool of_program) {
  follow_allocator();
  // torch.use_deterministic_algorithms fills what is fresh. What a kernel then writes past the
  // dispatcher into memory of its own is not noted: that counts as unwritten, filled or not.
  const at::Context& context = at::globalContext();
  if (of_program && context.deterministicAlgorithms() &&
      context.deterministicFillUninitializedMemory())
    return;
  if (result.isTensor() && is_plain(result.toTensor())) ranges().reset(span_of(result.toTensor()));
}

void after_copy_from_host(const c10::IValue& result) {
  follow_allocator();
  if (!result.isTensor() || !is_plain(result.toTensor())) return;
  const at::Tensor& tensor = result.toTensor();
  const auto whole = ranges().uniform(span_of(tensor));
  if (is_small(tensor) && whole && whole->state == State::unwritten) {
    note_written(tensor, State::known);
  }
}

// Calls function(tensor) for the small plain tensors of the arguments from `first` on.
template <typename Function>
void for_each_small(const std::vector<c10::IValue>& arguments, std::size_t first,
                    Function&& function) {
  for (std::size_t index = first; index < arguments.size(); ++index) {
    for_each_tensor(arguments[index], [&](const at::Tensor& tensor) {
      if (is_plain(tensor) && is_small(tensor)) function(tensor);
    });
  }
}

// Set while a collective runs on this thread: memory of its own, which was not written by an
// operator, then holds what NCCL wrote there, and the operators within it copy that to where it is
// wanted.
thread_local bool in_collective = false;

class WithinCollective {
 public:
  WithinCollective() : before_(std::exchange(in_collective, true)) {}
  WithinCollective(const WithinCollective&) = delete;
  WithinCollective& operator=(const WithinCollective&) = delete;
  ~WithinCollective() { in_collective = before_; }

 private:
  bool before_;
};

void note_written_by_nccl(const Operation& operation, const torch::jit::Stack& stack) {
  const std::vector<c10::IValue> arguments(
      stack.end() - static_cast<std::ptrdiff_t>(operation.parameters.size()), stack.end());
  for_each_small(arguments, 0, [](const at::Tensor& tensor) {
    const auto whole = ranges().uniform(span_of(tensor));
    if (whole && whole->state == State::unwritten) note_written(tensor, State::known);
  });
}

// How far what a collective gives is known, where this rank's data is. Of the group's ranks only
// this one is here; what one rank gives to all is its own where it is that one.
State given_by(const Operation& operation, const std::vector<c10::IValue>& arguments) {
  const auto group = std::find_if(arguments.begin(), arguments.end(),
                                  [](const auto& argument) { return argument.isCustomClass(); });
  if (group == arguments.end()) return State::known;
  const auto& ranks = *group->toCustomClass<c10d::ProcessGroup>();
  const bool from_root = operation.name == "c10d::broadcast_" || operation.name == "c10d::scatter_";
  const bool here = from_root && (group + 1)->toInt() == ranks.getRank();
  return here || ranks.getSize() == 1 ? State::known : State::alike;
}

bool has_tensors(const c10::IValue& argument) {
  bool found = false;
  for_each_tensor(argument, [&](const at::Tensor& tensor) { found = found || tensor.defined(); });
  return found;
}

// The virtual GPU's NCCL writes what other ranks would give if they had this rank's data, so it
// must find the data there, and nothing may be filled in afterwards. Of several tensor arguments
// the first is the result.
void pass_collective(const c10::OperatorHandle& handle, const Operation& operation,
                     c10::DispatchKeySet below, torch::jit::Stack* stack) {
  const std::vector<c10::IValue> arguments(
      stack->end() - static_cast<std::ptrdiff_t>(operation.parameters.size()), stack->end());
  const bool has_inputs = arguments.size() > 1 && has_tensors(arguments[1]);
  State state = given_by(operation, arguments);
  for_each_small(arguments, has_inputs ? 1 : 0, [&](const at::Tensor& tensor) {
    state = std::min(state, ranges().materialize(span_of(tensor)));
  });
  for_each_small(arguments, 0,
                 [](const at::Tensor& tensor) { ranges().materialize(span_of(tensor)); });
  {
    const WithinCollective within;
    handle.redispatchBoxed(below, stack);
  }
  if (operation.name == "c10d::send" || operation.name == "c10d::barrier") return;
  // What arrives does not depend on what the buffer held.
  if (operation.name.starts_with("c10d::recv_")) state = State::alike;
  for_each_tensor(arguments[0], [&](const at::Tensor& tensor) {
    if (!is_plain(tensor)) return;
    if (is_small(tensor)) {
      note_written(tensor, state);
    } else {
      note_not_computed(tensor);
    }
  });
}

// torch's own words for a state of its that cannot be.
constexpr std::string_view kCannotBe = "INTERNAL ASSERT FAILED";

void call_kernel(const c10::OperatorHandle& handle, const Call& call, c10::DispatchKeySet below,
                 torch::jit::Stack* stack) {
  try {
    handle.redispatchBoxed(below, stack);
  } catch (const c10::Error& error) {
    if (error.msg().find(kCannotBe) == std::string::npos || !call.can_do_without_kernel()) throw;
    std::vector<c10::IValue> results = call.results_of_cpu();
    torch::jit::drop(*stack, handle.schema().arguments().size());
    for (c10::IValue& result : results) stack->push_back(std::move(result));
  }
}

void pass(const c10::OperatorHandle& handle, const Operation& operation, c10::DispatchKeySet below,
          torch::jit::Stack* stack) {
  std::optional<Call> call;
  if (operation.kind == Kind::item || operation.kind == Kind::equal ||
      operation.kind == Kind::compute) {
    call.emplace(handle, operation, *stack);
    if (!call->concerns_us()) return handle.redispatchBoxed(below, stack);
  }
  const Within within(operation);
  if (within.first() && is_capturing()) {
    const std::vector<c10::IValue> arguments(
        stack->end() - static_cast<std::ptrdiff_t>(operation.parameters.size()), stack->end());
    captured = is_captured(arguments);
    if (captured) {
      handle.redispatchBoxed(below, stack);
      const auto returns = static_cast<std::ptrdiff_t>(handle.schema().returns().size());
      if (operation.kind != Kind::fresh)
        capture_call(handle, operation, arguments, {stack->end() - returns, stack->end()});
      return;
    }
  }
  if (captured) return handle.redispatchBoxed(below, stack);
  if (operation.kind == Kind::fresh) {
    handle.redispatchBoxed(below, stack);
    return after_fresh(stack->back(), within.first());
  }
  if (operation.kind == Kind::from_host) {
    handle.redispatchBoxed(below, stack);
    return after_copy_from_host(stack->back());
  }
  if (operation.kind == Kind::collective) {
    return pass_collective(handle, operation, below, stack);
  }
  if (operation.kind == Kind::copy && is_copy_between_host_and_device(*stack)) {
    const State state = copy_between_host_and_device(handle, below, *stack);
    read_within = std::min(read_within, state);
    if (state != State::known && within.first()) count_read(operation, state);
    return follow_allocator();
  }
  if (in_collective) note_written_by_nccl(operation, *stack);
  if (!call) call.emplace(handle, operation, *stack);
  if (!call->concerns_us()) return handle.redispatchBoxed(below, stack);
  call->prepare();
  if (operation.kind == Kind::item) call->read_inputs();  // the CUDA kernel copies it to the host
  call_kernel(handle, *call, below, stack);
  follow_allocator();
  const State state = operation.kind == Kind::item ? call->state() : call->finish(*stack);
  if (within.first() && call->error() != nullptr) std::rethrow_exception(call->error());
  if (operation.kind == Kind::item || operation.kind == Kind::equal ||
      (operation.dynamic_shape && state == State::alike)) {
    read_within = std::min(read_within, state);
  }
  if (state != State::known && read_within != State::known && within.first()) {
    count_read(operation, state);
  }
}

void intercept(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
               torch::jit::Stack* stack) {
  const c10::DispatchKeySet below =
      keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  const Operation& operation = operation_of(handle);
  // Modes and subclasses of Python call again with what they make of it.
  if (operation.kind == Kind::pass || keys.has(c10::DispatchKey::Python)) {
    return handle.redispatchBoxed(below, stack);
  }
  pass(handle, operation, below, stack);
}

}  // namespace

void install() {
  static const auto& library = *[] {
    auto* const made = new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
    made->fallback(torch::CppFunction::makeFromBoxedFunction<&intercept>());
    return made;
  }();
  static const auto& passing = *[] {
    // What would only be passed on is not even called here.
    auto* const made = new std::vector<c10::RegistrationHandleRAII>;
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      const auto handle = dispatcher.findSchema(name);
      if (!handle || is_seen(*handle) || handle->hasKernelForDispatchKey(kKey)) continue;
      made->push_back(dispatcher.registerImpl(name, kKey, c10::KernelFunction::makeFallthrough(),
                                              std::nullopt, nullptr, "values of the virtual GPU"));
    }
    return made;
  }();
  observe_outside([] { return outermost != nullptr; });
  static_cast<void>(library);
  static_cast<void>(passing);
}

void enable_thread() { c10::impl::tls_set_dispatch_key_included(kKey, true); }

}  // namespace opacus_memprof::virtual_values
