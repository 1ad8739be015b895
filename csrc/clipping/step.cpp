// SPDX-License-Identifier: Apache-2.0
#include "clipping/step.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/normal.h>

#include <algorithm>
#include <utility>

namespace opacus_memprof::clipping {

namespace {

using Tensors = std::vector<at::Tensor>;

bool are_alike(const Tensors& one, const Tensors& other, bool whole_shapes) {
  const auto agree = [](const at::Tensor& x, const at::Tensor& y) {
    return x.device() == y.device() && x.scalar_type() == y.scalar_type();
  };
  if (!whole_shapes) return agree(one[0], other[0]) && one[0].size(0) == other[0].size(0);
  return std::ranges::equal(one, other, [&](const at::Tensor& x, const at::Tensor& y) {
    return agree(x, y) && x.sizes() == y.sizes() && x.strides() == y.strides();
  });
}

using Pair = std::pair<at::Tensor, at::Tensor>;

bool is_one_product(const Pair& pair, const Pair& first, std::int64_t most) {
  const auto& [left, right] = pair;
  const bool is_alike = left.scalar_type() == first.first.scalar_type() &&
                        right.scalar_type() == left.scalar_type() &&
                        left.device() == first.first.device() && right.device() == left.device();
  const std::int64_t numbers = std::min(left.numel(), right.numel());
  return is_alike && left.size(0) > 1 && numbers > 0 &&
         numbers * static_cast<std::int64_t>(left.element_size()) <= most;
}

// Low precision rounds the product, not the factors.
at::Tensor scaled(const at::Tensor& x, const at::Tensor& factors) {
  std::vector<std::int64_t> shape(static_cast<std::size_t>(x.dim()), 1);
  shape[0] = x.size(0);
  const at::Tensor scale = factors.view(shape);
  if (x.scalar_type() == factors.scalar_type()) return x.mul(scale);
  at::Tensor out = at::empty_like(x);
  return at::mul_out(out, x, scale);
}

at::Tensor sum_outer_product(const Pair& pair, const at::Tensor& factors) {
  const auto& [left, right] = pair;
  const bool scales_left = left.size(-1) < right.size(-1);
  const at::Tensor rows = scales_left ? scaled(left, factors) : left;
  const at::Tensor columns = scales_left ? right : scaled(right, factors);
  return at::mm(rows.reshape({-1, rows.size(-1)}).t(), columns.reshape({-1, columns.size(-1)}));
}

}  // namespace

std::vector<std::vector<std::int64_t>> group_alike(
    const std::vector<std::vector<at::Tensor>>& lists, bool whole_shapes) {
  std::vector<std::vector<std::int64_t>> groups;
  for (std::size_t i = 0; i < lists.size(); ++i) {
    const auto fits = [&](const std::vector<std::int64_t>& group) {
      return are_alike(lists[group.front()], lists[i], whole_shapes);
    };
    const auto found = std::ranges::find_if(groups, fits);
    std::vector<std::int64_t>& group = found == groups.end() ? groups.emplace_back() : *found;
    group.push_back(static_cast<std::int64_t>(i));
  }
  return groups;
}

at::Tensor address_table(const std::vector<std::vector<at::Tensor>>& lists, bool with_sizes) {
  const at::Tensor& first = lists.at(0).at(0);
  const auto columns = static_cast<std::int64_t>(lists[0].size()) + (with_sizes ? 1 : 0);
  at::Tensor numbers = at::empty({static_cast<std::int64_t>(lists.size()), columns},
                                 at::TensorOptions(at::kLong).pinned_memory(first.is_cuda()));
  auto* next = numbers.mutable_data_ptr<std::int64_t>();
  for (const std::vector<at::Tensor>& row : lists) {
    for (const at::Tensor& each : row) *next++ = reinterpret_cast<std::int64_t>(each.data_ptr());
    if (with_sizes) *next++ = row[0].numel() / row[0].size(0);
  }
  return numbers.to(first.device(), /*non_blocking=*/true);
}

std::vector<at::Tensor> sum_outer_products(const std::vector<Pair>& pairs,
                                           const at::Tensor& factors, std::int64_t most) {
  std::vector<at::Tensor> sums;
  for (const Pair& pair : pairs) {
    if (!is_one_product(pair, pairs[0], most)) break;
    sums.push_back(sum_outer_product(pair, factors));
  }
  return sums;
}

std::vector<at::Tensor> empty_sums(const std::vector<at::Tensor>& stacks, at::ScalarType dtype) {
  std::vector<at::Tensor> sums;
  sums.reserve(stacks.size());
  for (const at::Tensor& stack : stacks)
    sums.push_back(at::empty(stack.sizes().slice(1), stack.options().dtype(dtype)));
  return sums;
}

std::vector<at::Tensor> draw_normal(const std::vector<at::Tensor>& references, double std,
                                    const std::optional<at::Generator>& generator) {
  std::vector<at::Tensor> drawn;
  drawn.reserve(references.size());
  for (const at::Tensor& each : references)
    drawn.push_back(at::normal(0, std, each.sizes(), generator, each.scalar_type(), at::kStrided,
                               each.device(), /*pin_memory=*/false));
  return drawn;
}

}  // namespace opacus_memprof::clipping
