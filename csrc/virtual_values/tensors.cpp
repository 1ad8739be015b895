// SPDX-License-Identifier: Apache-2.0
#include "virtual_values/tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/nan_to_num.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <dlfcn.h>

#include <algorithm>
#include <vector>

namespace opacus_memprof::virtual_values {
namespace {

// The most pieces of a large tensor, which may have a billion. A small one has as many as it has: a
// program writes it column by column, and then all of it is known.
constexpr std::size_t kPieces = 4096;

// The spans of the parts of a tensor that lie next to each other; empty if they are too many.
std::vector<Span> pieces_of(const at::Tensor& tensor) {
  const std::size_t most = is_small(tensor) ? small_bytes() : kPieces;
  // Dimensions from the innermost out, as long as they continue each other.
  std::vector<std::pair<std::int64_t, std::int64_t>> dimensions;  // stride, size
  for (std::int64_t index = 0; index < tensor.dim(); ++index) {
    if (tensor.size(index) > 1 && tensor.stride(index) != 0) {
      dimensions.emplace_back(tensor.stride(index), tensor.size(index));
    }
  }
  std::sort(dimensions.begin(), dimensions.end());
  std::int64_t length = 1;
  std::size_t inner = 0;
  while (inner < dimensions.size() && dimensions[inner].first == length) {
    length *= dimensions[inner++].second;
  }
  std::size_t count = 1;
  for (std::size_t index = inner; index < dimensions.size(); ++index) {
    count *= static_cast<std::size_t>(dimensions[index].second);
    if (count > most) return {};
  }
  const auto size = static_cast<std::uintptr_t>(tensor.itemsize());
  const std::uintptr_t begin = span_of(tensor).begin;
  std::vector<std::uintptr_t> starts{begin};
  starts.reserve(count);
  for (std::size_t index = inner; index < dimensions.size(); ++index) {
    const std::size_t before = starts.size();
    for (std::int64_t step = 1; step < dimensions[index].second; ++step) {
      for (std::size_t start = 0; start < before; ++start) {
        starts.push_back(starts[start] +
                         static_cast<std::uintptr_t>(step * dimensions[index].first) * size);
      }
    }
  }
  std::vector<Span> pieces;
  pieces.reserve(starts.size());
  for (const std::uintptr_t start : starts) {
    pieces.push_back({start, start + static_cast<std::uintptr_t>(length) * size});
  }
  return pieces;
}

}  // namespace

std::size_t small_bytes() {
  static const std::size_t bytes = [] {
    using Function = std::size_t();
    auto* const function =
        reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, "memprof_virtual_gpu_small_bytes"));
    TORCH_CHECK(function != nullptr, "there is no virtual GPU in this process");
    return function();
  }();
  return bytes;
}

Ranges& ranges() {
  static auto& instance = *new Ranges;
  return instance;
}

bool is_wrapper(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kWrapped{
      c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
      c10::DispatchKey::Functionalize, c10::DispatchKey::ZeroTensor};
  // A subclass whose own code is running has switched the key off, and uses its memory.
  return tensor.key_set().has_any(kWrapped) ||
         (tensor.key_set().has(c10::DispatchKey::Python) &&
          !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python));
}

bool is_half(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_cuda() && tensor.layout() == at::kStrided && tensor.has_storage() &&
         !tensor.is_quantized() && !tensor.is_nested() && !is_wrapper(tensor);
}

Span span_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  std::int64_t last = 0;
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  for (std::size_t index = 0; index < sizes.size(); ++index) {
    last += (sizes[index] - 1) * strides[index];
  }
  // Of the storage, since a tensor without memory refuses: FSDP frees that of its parameters.
  const void* const data = tensor.unsafeGetTensorImpl()->unsafe_storage().data();
  if (data == nullptr) return {};
  const auto begin = reinterpret_cast<std::uintptr_t>(data) +
                     static_cast<std::uintptr_t>(tensor.storage_offset()) * tensor.itemsize();
  return {begin, begin + static_cast<std::uintptr_t>(last + 1) * tensor.itemsize()};
}

bool is_small(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return true;
  const std::size_t size = span_of(tensor).size();
  return size > 0 && size <= small_bytes();
}

bool is_dense(const at::Tensor& tensor) {
  return span_of(tensor).size() == static_cast<std::size_t>(tensor.numel()) * tensor.itemsize();
}

at::Tensor alias_on_cpu(const at::Tensor& tensor) {
  return alias_on(tensor, c10::Device(c10::DeviceType::CPU));
}

at::Tensor alias_on(const at::Tensor& tensor, c10::Device device) {
  const Span span = span_of(tensor);
  auto* const begin = reinterpret_cast<void*>(span.begin);  // NOLINT(performance-no-int-to-ptr)
  c10::Storage storage(c10::Storage::use_byte_size_t(), span.size(), c10::DataPtr(begin, device),
                       nullptr, false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage),
      c10::DispatchKeySet(device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU),
      tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

void make_finite(const at::Tensor& tensor) {
  if (!at::isFloatingType(tensor.scalar_type()) && !at::isComplexType(tensor.scalar_type())) return;
  at::nan_to_num_(const_cast<at::Tensor&>(tensor), 0.0, 0.0, 0.0);
}

State state_of(const at::Tensor& tensor) {
  const auto pieces = is_dense(tensor) ? std::vector<Span>() : pieces_of(tensor);
  if (pieces.empty()) return ranges().lowest(span_of(tensor));
  State lowest = State::known;
  for (const Span& piece : pieces) lowest = std::min(lowest, ranges().lowest(piece));
  return lowest;
}

void note_written(const at::Tensor& tensor, State state) {
  const Span span = span_of(tensor);
  if (span.size() == 0) return;
  if (is_dense(tensor)) return ranges().set(span, state);
  const auto pieces = pieces_of(tensor);
  for (const Span& piece : pieces) ranges().set(piece, state);
  if (pieces.empty()) ranges().set(span, std::min(state, ranges().materialize(span)));
}

bool is_partly_computed(const at::Tensor& tensor) {
  const Span span = span_of(tensor);
  if (span.size() == 0 || ranges().uniform(span)) return false;
  const auto states = ranges().each(span, tensor.itemsize());
  const auto computed = std::count_if(states.begin(), states.end(), is_computed);
  return computed > 0 && computed < static_cast<std::ptrdiff_t>(states.size());
}

void note_copied(const at::Tensor& from, const at::Tensor& to) {
  constexpr auto kBetween = static_cast<State>(0xFF);
  const Span span = span_of(to);
  auto given = ranges().each(span_of(from), from.itemsize());
  std::vector<State> taken(span.size() / to.itemsize(), kBetween);
  // A byte for each element, where the element is.
  const auto states_as = [](std::vector<State>& states, const at::Tensor& like) {
    return at::from_blob(states.data(), like.sizes(), like.strides(), at::kByte);
  };
  states_as(taken, to).copy_(states_as(given, from));
  for (std::size_t begin = 0, end = 0; begin < taken.size(); begin = end) {
    while (end < taken.size() && taken[end] == taken[begin]) ++end;
    if (taken[begin] == kBetween) continue;
    ranges().set({span.begin + begin * to.itemsize(), span.begin + end * to.itemsize()},
                 std::max(taken[begin], State::assumed));
  }
}

void note_not_computed(const at::Tensor& tensor) {
  const Span span = span_of(tensor);
  if (span.size() == 0) return;
  if (is_dense(tensor)) return ranges().set_not_computed(span);
  const auto pieces = pieces_of(tensor);
  for (const Span& piece : pieces) ranges().set_not_computed(piece);
  // What lies between keeps its bytes, if it can be told apart; else all of it is as if it were not
  // written.
  if (pieces.empty()) ranges().set_not_computed(span);
}

}  // namespace opacus_memprof::virtual_values
