// SPDX-License-Identifier: Apache-2.0
#include "clipping/step.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/normal.h>

#include <algorithm>
#include <mutex>
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

// The numbers on the device, for which the host does not wait.
at::Tensor table_on(const at::Device& device, const std::vector<std::int64_t>& numbers,
                    std::int64_t columns) {
  const auto rows = static_cast<std::int64_t>(numbers.size()) / columns;
  at::Tensor table =
      at::empty({rows, columns}, at::TensorOptions(at::kLong).pinned_memory(device.is_cuda()));
  std::ranges::copy(numbers, table.mutable_data_ptr<std::int64_t>());
  return table.to(device, /*non_blocking=*/true);
}

std::int64_t address_of(const at::Tensor& tensor) {
  return reinterpret_cast<std::int64_t>(tensor.data_ptr());
}

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

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
  const std::size_t columns = lists.at(0).size() + (with_sizes ? 1 : 0);
  std::vector<std::int64_t> numbers;
  numbers.reserve(lists.size() * columns);
  for (const std::vector<at::Tensor>& row : lists) {
    for (const at::Tensor& each : row) numbers.push_back(address_of(each));
    if (with_sizes) numbers.push_back(row[0].numel() / row[0].size(0));
  }
  return table_on(lists[0].at(0).device(), numbers, static_cast<std::int64_t>(columns));
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

NormalNumbers reserve_normal(const std::vector<at::Tensor>& sums,
                             const std::optional<at::Generator>& generator,
                             std::int64_t most_threads, std::int64_t threads_of_program) {
  constexpr std::int64_t threads_of_block = 256;  // as torch draws
  constexpr std::int64_t numbers_of_counter = 4;  // for each thread
  const at::Device device = sums.at(0).device();
  at::Generator source = generator ? *generator : at::globalContext().defaultGenerator(device);
  NormalNumbers reserved;
  std::vector<std::int64_t> numbers;
  numbers.reserve(sums.size() * 6);
  {
    const std::lock_guard<std::mutex> lock(source.mutex());
    const auto seed = static_cast<std::int64_t>(source.current_seed());
    auto counter = static_cast<std::int64_t>(source.get_offset()) / numbers_of_counter;
    for (const at::Tensor& sum : sums) {
      const std::int64_t size = sum.numel();
      if (size == 0) continue;
      const std::int64_t threads =
          std::min(divide_up(size, threads_of_block) * threads_of_block, most_threads);
      const std::int64_t counters = divide_up(size, threads * numbers_of_counter);
      numbers.insert(numbers.end(),
                     {address_of(sum), size, threads, counter, reserved.programs, seed});
      counter += counters;
      reserved.programs += counters * divide_up(threads, threads_of_program);
    }
    source.set_offset(static_cast<std::uint64_t>(counter * numbers_of_counter));
  }
  reserved.table = table_on(device, numbers, 6);
  return reserved;
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
