// SPDX-License-Identifier: Apache-2.0
#include "virtual_values/parts.h"

#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/quantized/QTensorImpl.h>

#include <algorithm>

namespace opacus_memprof::virtual_values {
namespace {

at::SparseTensorImpl& coordinates(const at::Tensor& tensor) {
  return *static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

at::SparseCsrTensorImpl& compressed(const at::Tensor& tensor) {
  return *static_cast<at::SparseCsrTensorImpl*>(tensor.unsafeGetTensorImpl());
}

at::native::NestedTensorImpl& nested(const at::Tensor& tensor) {
  return *static_cast<at::native::NestedTensorImpl*>(tensor.unsafeGetTensorImpl());
}

at::QTensorImpl& quantized(const at::Tensor& tensor) {
  return *static_cast<at::QTensorImpl*>(tensor.unsafeGetTensorImpl());
}

bool is_compressed(const at::Tensor& tensor) {
  const at::Layout layout = tensor.layout();
  return layout == at::kSparseCsr || layout == at::kSparseCsc || layout == at::kSparseBsr ||
         layout == at::kSparseBsc;
}

// Nested tensors of Python have their parts in Python.
bool is_nested_in_cpp(const at::Tensor& tensor) {
  return tensor.is_nested() && tensor.layout() == at::kStrided;
}

// The numbers that a quantized tensor is stored as.
at::Tensor stored(const at::Tensor& tensor) {
  auto numbers = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(tensor.unsafeGetTensorImpl()->unsafe_storage()),
      c10::DispatchKeySet(tensor.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(c10::toUnderlying(tensor.scalar_type())));
  numbers.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                       tensor.storage_offset());
  return numbers;
}

at::QuantizerPtr quantizer_on_cpu(const at::Tensor& tensor) {
  const at::QuantizerPtr quantizer = quantized(tensor).quantizer();
  const auto* const channels = dynamic_cast<at::PerChannelAffineQuantizer*>(quantizer.get());
  if (channels == nullptr) return quantizer;
  const auto on_cpu = [](const at::Tensor& numbers) {
    if (!numbers.is_cuda()) return numbers;
    TORCH_CHECK(is_small(numbers), "too many channels");
    ranges().materialize(span_of(numbers));
    return alias_on_cpu(numbers);
  };
  return at::make_per_channel_affine_quantizer(on_cpu(channels->scales()),
                                               on_cpu(channels->zero_points()), channels->axis(),
                                               tensor.scalar_type());
}

at::Tensor of_coordinates(const at::Tensor& like, const at::Tensor& indices,
                          const at::Tensor& values, std::int64_t dense_dim, at::IntArrayRef sizes) {
  auto made = at::detail::make_tensor<at::SparseTensorImpl>(
      c10::DispatchKeySet(c10::DispatchKey::SparseCPU), like.dtype());
  coordinates(made).raw_resize_(coordinates(like).sparse_dim(), dense_dim, sizes);
  coordinates(made).set_indices_and_values_unsafe(indices, values);
  coordinates(made).set_coalesced(coordinates(like).coalesced());
  return made;
}

}  // namespace

std::vector<at::Tensor> parts_of(const at::Tensor& tensor) {
  if (is_wrapper(tensor)) return {};
  if (tensor.layout() == at::kSparse)
    return {coordinates(tensor).indices(), coordinates(tensor).values()};
  if (is_compressed(tensor))
    return {compressed(tensor).compressed_indices(), compressed(tensor).plain_indices(),
            compressed(tensor).values()};
  if (is_nested_in_cpp(tensor)) return {nested(tensor).get_unsafe_storage_as_tensor()};
  if (tensor.is_quantized()) return {stored(tensor)};
  if (tensor.layout() == at::kStrided && tensor.has_storage()) return {tensor};
  return {};
}

bool is_compound(const at::Tensor& tensor) {
  if (!tensor.is_cuda() || is_plain(tensor)) return false;
  const auto parts = parts_of(tensor);
  return !parts.empty() && std::all_of(parts.begin(), parts.end(), [](const at::Tensor& part) {
    return part.defined() && is_plain(part);
  });
}

at::Tensor compound_on_cpu(const at::Tensor& tensor) {
  const auto parts = parts_of(tensor);
  if (tensor.layout() == at::kSparse) {
    return of_coordinates(tensor, alias_on_cpu(parts[0]), alias_on_cpu(parts[1]),
                          coordinates(tensor).dense_dim(), tensor.sizes());
  }
  if (is_compressed(tensor)) {
    auto made = at::detail::make_tensor<at::SparseCsrTensorImpl>(
        c10::DispatchKeySet(c10::DispatchKey::SparseCsrCPU), c10::Device(c10::DeviceType::CPU),
        tensor.layout(), tensor.dtype());
    compressed(made).set_member_tensors(alias_on_cpu(parts[0]), alias_on_cpu(parts[1]),
                                        alias_on_cpu(parts[2]), tensor.sizes());
    return made;
  }
  if (is_nested_in_cpp(tensor)) {
    return at::detail::make_tensor<at::native::NestedTensorImpl>(
        alias_on_cpu(parts[0]), nested(tensor).get_nested_sizes(),
        nested(tensor).get_nested_strides(), nested(tensor).get_storage_offsets());
  }
  TORCH_CHECK(tensor.is_quantized(), "a tensor of a kind that the CPU does not have");
  const at::Tensor numbers = alias_on_cpu(parts[0]);
  auto made = at::detail::make_tensor<at::QTensorImpl>(
      c10::Storage(numbers.storage()), c10::DispatchKeySet(c10::DispatchKey::QuantizedCPU),
      tensor.dtype(), quantizer_on_cpu(tensor));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return made;
}

at::Tensor indices_on_cpu(const at::Tensor& tensor) {
  const auto parts = parts_of(tensor);
  auto sizes =
      tensor.sizes().slice(0, static_cast<std::size_t>(coordinates(tensor).sparse_dim())).vec();
  sizes.push_back(0);
  return of_coordinates(tensor, alias_on_cpu(parts[0]),
                        at::empty({parts[1].size(0), 0}, parts[1].options().device(at::kCPU)), 1,
                        sizes);
}

std::vector<at::Tensor> allocate_parts(const at::Tensor& tensor,
                                       const std::vector<std::vector<std::int64_t>>& sizes) {
  auto parts = parts_of(tensor);
  for (std::size_t index = 0; index < parts.size(); ++index) {
    if (parts[index].sizes() != sizes[index])
      parts[index] = at::empty(sizes[index], parts[index].options());
  }
  if (tensor.layout() == at::kSparse) {
    coordinates(tensor).set_indices_and_values_unsafe(parts[0], parts[1]);
  } else {
    TORCH_CHECK(is_compressed(tensor), "a result as on the CPU");
    compressed(tensor).set_member_tensors(parts[0], parts[1], parts[2], tensor.sizes());
  }
  return parts;
}

bool is_coalesced(const at::Tensor& tensor) {
  return tensor.layout() == at::kSparse && coordinates(tensor).coalesced();
}

void set_coalesced(const at::Tensor& tensor, bool coalesced) {
  if (tensor.layout() == at::kSparse) coordinates(tensor).set_coalesced(coalesced);
}

}  // namespace opacus_memprof::virtual_values
