// SPDX-License-Identifier: Apache-2.0
#include "virtual_values/copy.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "virtual_values/execute.h"
#include "virtual_values/tensors.h"

namespace opacus_memprof::virtual_values {
namespace {

constexpr std::size_t kArguments = 3;  // self, src, non_blocking
constexpr std::size_t kPage = 4096;

bool is_host(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.has_storage() &&
         !tensor.is_nested() && !tensor.is_conj() && !tensor.is_neg();
}

// Pages that are zero already are not written: they may not exist yet.
void clear(at::Tensor& tensor) {
  auto* bytes = static_cast<std::uint8_t*>(tensor.data_ptr());
  const std::size_t size = static_cast<std::size_t>(tensor.numel()) * tensor.itemsize();
  for (std::size_t at = 0; at < size; at += kPage) {
    const std::size_t length = std::min(kPage, size - at);
    if (std::any_of(bytes + at, bytes + at + length, [](std::uint8_t byte) { return byte != 0; })) {
      std::memset(bytes + at, 0, length);
    }
  }
}

State to_host(at::Tensor& host, const at::Tensor& device, State state) {
  if (is_small(device)) {
    const OnCpu on_cpu;
    host.copy_(alias_on_cpu(device));
    return state;
  }
  const OnCpu on_cpu;
  const auto whole = ranges().uniform(span_of(device));
  if (whole && is_computed(whole->state) && !device.is_conj() && !device.is_neg()) {
    at::Tensor element = at::empty({}, device.options().device(at::kCPU));
    auto* const bytes = static_cast<std::uint8_t*>(element.data_ptr());
    for (std::size_t index = 0; index < device.itemsize(); ++index) {
      bytes[index] = whole->pattern.bytes[index % whole->pattern.size];
    }
    host.copy_(element);
    return whole->state;
  }
  if (host.is_contiguous()) {
    clear(host);
  } else {
    host.zero_();
  }
  return State::assumed;
}

}  // namespace

bool is_copy_between_host_and_device(const torch::jit::Stack& stack) {
  const at::Tensor& self = stack[stack.size() - kArguments].toTensor();
  const at::Tensor& source = stack[stack.size() - kArguments + 1].toTensor();
  return self.defined() && source.defined() && self.numel() > 0 &&
         ((is_plain(self) && is_host(source)) || (is_host(self) && is_plain(source)));
}

State copy_between_host_and_device(const c10::OperatorHandle& handle, c10::DispatchKeySet below,
                                   torch::jit::Stack& stack) {
  const torch::jit::Stack arguments(stack.end() - kArguments, stack.end());
  const at::Tensor& source = arguments[1].toTensor();
  if (source.is_cuda() && is_small(source)) ranges().materialize(span_of(source));
  handle.redispatchBoxed(below, &stack);
  return copy_values_between_host_and_device(arguments);
}

State copy_values_between_host_and_device(const torch::jit::Stack& stack) {
  at::Tensor self = stack[stack.size() - kArguments].toTensor();
  const at::Tensor source = stack[stack.size() - kArguments + 1].toTensor();
  if (source.is_cuda()) {
    if (!is_small(source)) return to_host(self, source, State::assumed);
    const State state = std::max(State::assumed, state_of(source));
    ranges().materialize(span_of(source));
    return to_host(self, source, state);
  }
  if (is_small(self)) {
    const OnCpu on_cpu;
    alias_on_cpu(self).copy_(source);
    note_written(self, State::known);
  } else {
    note_not_computed(self);
  }
  return State::known;
}

}  // namespace opacus_memprof::virtual_values
