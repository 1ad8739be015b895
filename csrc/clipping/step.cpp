// SPDX-License-Identifier: Apache-2.0
#include "clipping/step.h"

#include <ATen/Context.h>
#include <ATen/Dispatch.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/normal.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <atomic>
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

// Returns whether adjacent elements belong to adjacent tokens rather than features, as in
// convolutions.
bool is_by_feature(const at::Tensor& x) {
  return x.dim() == 3 && x.stride(1) == 1 && x.stride(2) != 1;
}

std::int64_t bytes_of(const at::Tensor& x) {
  return x.numel() * static_cast<std::int64_t>(x.element_size());
}

bool is_low_precision(const at::Tensor& x) {
  return x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
}

// Returns whether a scaled operand is multiplied as the sum of two matrices of this dtype, into
// float32. The exponents of float16 have a smaller range than float32's.
bool is_split(const at::Tensor& x) { return x.is_cuda() && x.scalar_type() == at::kBFloat16; }

// Returns the bytes of the copies that forming the product makes.
std::int64_t copied_bytes(const at::Tensor& narrow, const at::Tensor& wide) {
  const std::int64_t folded = is_by_feature(wide) ? bytes_of(wide) : 0;
  if (!is_low_precision(narrow)) return bytes_of(narrow) + folded;
  if (is_split(narrow)) return 4 * bytes_of(narrow) + folded;  // in float32, and as two numbers
  return 2 * (bytes_of(narrow) + bytes_of(wide));              // both operands in float32
}

bool is_one_product(const Pair& pair, const Pair& first, std::int64_t most) {
  const auto& [left, right] = pair;
  const bool is_alike = left.scalar_type() == first.first.scalar_type() &&
                        right.scalar_type() == left.scalar_type() &&
                        left.device() == first.first.device() && right.device() == left.device();
  if (!is_alike || left.size(0) < 2 || left.numel() == 0 || right.numel() == 0) return false;
  const auto& [narrow, wide] = left.numel() < right.numel() ? pair : Pair(right, left);
  return copied_bytes(narrow, wide) <= most;
}

at::Tensor as_stored(const at::Tensor& x) { return is_by_feature(x) ? x.permute({2, 0, 1}) : x; }

// Returns x [N, ..., features], stored as `as_stored(x)`, as a matrix [features, all else].
at::Tensor folded(const at::Tensor& x, const at::Tensor& stored) {
  const std::int64_t features = x.size(-1);
  if (is_by_feature(x)) return stored.reshape({features, -1});
  return stored.reshape({-1, features}).t();
}

// Returns each sample of `as_stored(x)` times its factor, in the factors' dtype: float32 for low
// precision, which would round each number again.
at::Tensor scaled(const at::Tensor& x, const at::Tensor& factors) {
  const at::Tensor stored = as_stored(x);
  std::vector<std::int64_t> shape(static_cast<std::size_t>(x.dim()), 1);
  shape[is_by_feature(x) ? 1 : 0] = x.size(0);
  at::Tensor product = at::empty(stored.sizes(), factors.options());
  return at::mul_out(product, stored, factors.view(shape));
}

at::Tensor sum_outer_product(const Pair& pair, const at::Tensor& factors) {
  const auto& [left, right] = pair;
  const bool scales_left = left.size(-1) < right.size(-1);
  const at::Tensor& narrow = scales_left ? left : right;
  const at::Tensor& wide = scales_left ? right : left;
  at::Tensor own = scaled(narrow, factors);
  const auto product = [&](const at::Tensor& stored, const at::Tensor& other,
                           const std::optional<at::ScalarType>& dtype) {
    const at::Tensor one = folded(narrow, stored);
    const at::Tensor& rows = scales_left ? one : other;
    const at::Tensor columns = (scales_left ? other : one).t();
    return dtype ? at::mm(rows, columns, *dtype) : at::mm(rows, columns);
  };
  const at::Tensor other = folded(wide, as_stored(wide));
  if (!is_low_precision(narrow)) return product(own, other, std::nullopt);
  if (!is_split(narrow)) return product(own, other.to(at::kFloat), std::nullopt);
  const at::Tensor high = own.to(at::kBFloat16);
  const at::Tensor low = own.sub_(high).to(at::kBFloat16);
  own.reset();
  return product(high, other, at::kFloat).add_(product(low, other, at::kFloat));
}

// Returns whether a loop over both takes less time than torch needs to begin an operation, or to
// share it among threads.
bool are_short(const at::Tensor& x, const at::Tensor& y) {
  constexpr std::int64_t most = 1 << 16;
  const bool has_type = x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble;
  return has_type && x.is_cpu() && x.is_contiguous() && y.scalar_type() == x.scalar_type() &&
         y.is_cpu() && y.is_contiguous() && y.sizes() == x.sizes() && x.numel() <= most;
}

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

void check_list(const Tensors& list) {
  TORCH_CHECK(!list.empty() && list[0].dim() > 0,
              "a list must begin with a tensor that has a dimension of samples");
}

struct TablesOfGraph {
  std::mutex mutex;
  std::atomic<bool> is_captured = false;
  at::Tensor memory;
  std::int64_t used = 0;
  std::vector<std::pair<at::Tensor, at::Tensor>> tables;

  at::Tensor add(const at::Tensor& rows) {
    constexpr std::int64_t aligned = 16;  // numbers; kernels are compiled for this alignment
    const std::lock_guard<std::mutex> lock(mutex);
    TORCH_CHECK(used + rows.numel() <= memory.numel(), "too many small gradients for one graph");
    at::Tensor table = memory.narrow(0, used, rows.numel()).view(rows.sizes());
    used += divide_up(rows.numel(), aligned) * aligned;
    tables.emplace_back(table, rows);
    return table;
  }
};

TablesOfGraph& tables_of_graph() {
  static TablesOfGraph tables;
  return tables;
}

// Returns the numbers on the device. The host does not wait.
at::Tensor table_on(const at::Device& device, const std::vector<std::int64_t>& numbers,
                    std::int64_t columns) {
  const auto rows = static_cast<std::int64_t>(numbers.size()) / columns;
  const bool is_captured = tables_of_graph().is_captured;
  const auto options = at::TensorOptions(at::kLong);
  at::Tensor on_host =
      at::empty({rows, columns}, options.pinned_memory(device.is_cuda() && !is_captured));
  std::ranges::copy(numbers, on_host.mutable_data_ptr<std::int64_t>());
  return is_captured ? tables_of_graph().add(on_host) : on_host.to(device, /*non_blocking=*/true);
}

std::int64_t address_of(const at::Tensor& tensor) {
  return reinterpret_cast<std::int64_t>(tensor.data_ptr());
}

}  // namespace

std::vector<std::vector<std::int64_t>> group_alike(
    const std::vector<std::vector<at::Tensor>>& lists, bool whole_shapes) {
  std::vector<std::vector<std::int64_t>> groups;
  for (const Tensors& list : lists) check_list(list);
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
  TORCH_CHECK(!lists.empty(), "there must be a list");
  for (const Tensors& list : lists) {
    check_list(list);
    TORCH_CHECK(list.size() == lists[0].size(), "the lists must have the same length");
  }
  const std::size_t columns = lists[0].size() + (with_sizes ? 1 : 0);
  std::vector<std::int64_t> numbers;
  numbers.reserve(lists.size() * columns);
  for (const std::vector<at::Tensor>& row : lists) {
    for (const at::Tensor& each : row) numbers.push_back(address_of(each));
    if (with_sizes) numbers.push_back(c10::multiply_integers(row[0].sizes().slice(1)));
  }
  return table_on(lists[0].at(0).device(), numbers, static_cast<std::int64_t>(columns));
}

at::Tensor product_table(const std::vector<Pair>& pairs, const std::vector<at::Tensor>& sums) {
  constexpr std::int64_t columns = 12;
  std::vector<std::int64_t> numbers;
  numbers.reserve(pairs.size() * columns);
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    const auto& [left, right] = pairs[i];
    TORCH_CHECK(left.dim() > 1 && right.dim() > 1, "tensors must have samples and features");
    const auto middle = left.sizes().slice(1, static_cast<std::size_t>(left.dim()) - 2);
    const std::int64_t tokens = c10::multiply_integers(middle);
    numbers.insert(numbers.end(), {address_of(left), address_of(right), address_of(sums.at(i)),
                                   tokens, left.size(-1), right.size(-1)});
    for (const at::Tensor& each : {left, right})
      numbers.insert(numbers.end(), {each.stride(0), each.stride(-2), each.stride(-1)});
  }
  return table_on(sums.at(0).device(), numbers, columns);
}

void begin_tables_of_graph(const at::Tensor& memory) {
  const std::lock_guard<std::mutex> lock(tables_of_graph().mutex);
  tables_of_graph().memory = memory;
  tables_of_graph().used = 0;
  tables_of_graph().is_captured = true;
}

std::vector<std::pair<at::Tensor, at::Tensor>> end_tables_of_graph() {
  tables_of_graph().is_captured = false;
  const std::lock_guard<std::mutex> lock(tables_of_graph().mutex);
  tables_of_graph().memory.reset();
  return std::exchange(tables_of_graph().tables, {});
}

std::vector<at::Tensor> sum_outer_products(const std::vector<Pair>& pairs,
                                           const at::Tensor& factors, std::int64_t most) {
  std::vector<at::Tensor> sums;
  for (const Pair& pair : pairs) {
    if (!is_one_product(pair, pairs[0], most)) break;
    const auto index = static_cast<std::int64_t>(sums.size());
    sums.push_back(sum_outer_product(pair, factors.dim() == 2 ? factors[index] : factors));
  }
  return sums;
}

std::vector<at::Tensor> empty_sums(const std::vector<at::Tensor>& stacks, at::ScalarType dtype) {
  std::vector<at::Tensor> sums;
  sums.reserve(stacks.size());
  for (const at::Tensor& stack : stacks) {
    TORCH_CHECK(stack.dim() > 0, "stacks must have a dimension of samples");
    sums.push_back(at::empty(stack.sizes().slice(1), stack.options().dtype(dtype)));
  }
  return sums;
}

NormalNumbers reserve_normal(const std::vector<at::Tensor>& sums,
                             const std::optional<at::Generator>& generator,
                             std::int64_t most_threads, std::int64_t threads_of_program) {
  constexpr std::int64_t threads_of_block = 256;  // as in torch
  constexpr std::int64_t numbers_of_counter = 4;  // for each thread
  TORCH_CHECK(!sums.empty(), "there must be a sum");
  TORCH_CHECK(most_threads > 0 && threads_of_program > 0, "numbers of threads must be positive");
  const at::Device device = sums[0].device();
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

void add_and_divide(const std::vector<at::Tensor>& sums, const std::vector<at::Tensor>& noise,
                    double divisor) {
  TORCH_CHECK(sums.size() == noise.size(), "each sum must have its noise");
  if (std::ranges::none_of(sums, &at::Tensor::is_cpu)) {
    at::_foreach_add_(sums, noise);
    if (divisor != 1) at::_foreach_div_(sums, divisor);
    return;
  }
  for (std::size_t i = 0; i < sums.size(); ++i) {
    if (!are_short(sums[i], noise[i])) {
      sums[i].add_(noise[i]);
      if (divisor != 1) sums[i].div_(divisor);
      continue;
    }
    AT_DISPATCH_FLOATING_TYPES(sums[i].scalar_type(), "add_and_divide", [&] {
      auto* const totals = sums[i].mutable_data_ptr<scalar_t>();
      const auto* const numbers = noise[i].const_data_ptr<scalar_t>();
      const auto by = static_cast<scalar_t>(divisor);
      for (std::int64_t j = 0; j < sums[i].numel(); ++j) totals[j] = (totals[j] + numbers[j]) / by;
    });
  }
}

}  // namespace opacus_memprof::clipping
