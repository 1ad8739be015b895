// SPDX-License-Identifier: Apache-2.0
#include "virtual_values/execute.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/List.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "virtual_values/tensors.h"

// Of the OpenMP that torch has loaded, if it was built with it.
extern "C" [[gnu::weak]] void omp_set_num_threads(int count);

namespace opacus_memprof::virtual_values {
namespace {

class NoWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& /*warning*/) override {}
};

NoWarnings no_warnings;

// Draws that name no generator come from the CPU's default one, whose state is the program's.
class DefaultGenerator {
 public:
  explicit DefaultGenerator(std::uint64_t seed) : generator_(at::detail::getDefaultCPUGenerator()) {
    const std::lock_guard lock(generator_.mutex());
    before_ = generator_.get_state();
    generator_.set_current_seed(seed);
  }
  DefaultGenerator(const DefaultGenerator&) = delete;
  DefaultGenerator& operator=(const DefaultGenerator&) = delete;
  ~DefaultGenerator() {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_state(before_);
  }

 private:
  at::Generator generator_;
  at::Tensor before_;
};

// Arguments on the CPU. If `widened`, those in half and bfloat16 become float.
class OnCpuArguments {
 public:
  OnCpuArguments(const Compounds& compounds, bool widened)
      : compounds_(compounds), widened_(widened) {}

  [[nodiscard]] c10::IValue operator()(const c10::IValue& value) {
    if (value.isDevice())
      return value.toDevice().is_cuda() ? c10::Device(c10::DeviceType::CPU) : value.toDevice();
    TORCH_CHECK(!value.isStorage() && !value.isStream() && !value.isCustomClass(),
                "an argument has no counterpart on the CPU");
    return with_tensors(value, [this](const at::Tensor& tensor) { return of(tensor); });
  }

  // After the call: some operators write in place without saying so, as batch norm its averages.
  void write_back() const {
    for (const auto& [tensor, wide] : wide_) {
      const at::Tensor there = alias_on_cpu(tensor);
      if (!there.to(at::kFloat).equal(wide)) there.copy_(wide);
    }
  }

 private:
  [[nodiscard]] at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    if (is_plain(tensor)) return widened_ && is_half(tensor) ? wide(tensor) : alias_on_cpu(tensor);
    const at::Tensor* const found = find(compounds_, tensor);
    TORCH_CHECK(found != nullptr, "an argument has no counterpart on the CPU");
    return *found;
  }

  [[nodiscard]] at::Tensor wide(const at::Tensor& tensor) {
    if (const at::Tensor* const found = find(wide_, tensor)) return *found;
    wide_.emplace_back(tensor, alias_on_cpu(tensor).to(at::kFloat));
    return wide_.back().second;
  }

  static const at::Tensor* find(const Compounds& pairs, const at::Tensor& tensor) {
    const auto found = std::find_if(pairs.begin(), pairs.end(),
                                    [&](const auto& each) { return each.first.is_same(tensor); });
    return found == pairs.end() ? nullptr : &found->second;
  }

  const Compounds& compounds_;
  const bool widened_;
  Compounds wide_;
};

}  // namespace

// Executed operations are small: waking other threads would take longer than the operation. The
// number of threads is this thread's own setting.
class OneThread {
 public:
  OneThread() : before_(at::get_num_threads()) { set(1); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;
  ~OneThread() { set(before_); }

 private:
  static void set(int count) {
    if (omp_set_num_threads != nullptr) omp_set_num_threads(count);
  }
  int before_;
};

struct OnCpu::State {
  OneThread one_thread;
  c10::impl::ForceDispatchKeyGuard keys{c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
                                        c10::default_excluded_set |
                                            c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                            c10::DispatchKeySet(c10::DispatchKey::Python)};
  at::RecordFunctionGuard no_records{false};
  c10::WarningUtils::WarningHandlerGuard warnings{&no_warnings};
};

OnCpu::OnCpu() : state_(new State) {}
OnCpu::~OnCpu() { delete state_; }

namespace {
// The CPU's generator takes the lowest 32 bits of a seed. Further draws with one offset are as far
// from one another in these as offsets never are.
constexpr std::uint64_t kFar = 0x9E3779B9;

thread_local std::uint64_t new_draws = 0;
thread_local bool draws_anew = false;

// cuDNN's dropout has a state of its own, and draws anew in each call. torch makes a state once,
// and another one after its generator was seeded, while it still holds the one before. (Its
// generator must not be moved on, which would have it make one for each call.)
std::uint64_t dropout_draws(const std::optional<at::Tensor>& state) {
  static std::mutex mutex;
  static auto& latest = *new std::map<c10::DeviceIndex, std::pair<const void*, std::uint64_t>>;
  if (!state) return 0;
  const std::lock_guard lock(mutex);
  auto& [address, draws] = latest[state->get_device()];
  draws = address == state->const_data_ptr() ? draws + 1 : 0;
  address = state->const_data_ptr();
  return draws;
}
}  // namespace

NewDraw::NewDraw() {
  ++new_draws;
  draws_anew = true;
}
NewDraw::~NewDraw() { draws_anew = false; }

std::uint64_t seed_of_draw(const Operation& operation, const std::vector<c10::IValue>& arguments) {
  at::Generator generator;
  if (operation.generator >= 0) {
    const c10::IValue& value = arguments[static_cast<std::size_t>(operation.generator)];
    if (value.isGenerator()) generator = value.toGenerator();
  }
  if (!generator.defined()) {
    for (const c10::IValue& argument : arguments) {
      for_each_tensor(argument, [&](const at::Tensor& tensor) {
        if (!generator.defined() && tensor.is_cuda()) {
          generator = at::globalContext().defaultGenerator(tensor.device());
        }
      });
    }
  }
  if (!generator.defined() || generator.device().is_cpu()) return c10::default_rng_seed_val;
  const std::lock_guard lock(generator.mutex());
  std::uint64_t offset = 0;
  if (operation.name == "aten::_cudnn_rnn" && arguments[11].toDouble() > 0)
    offset += kFar * dropout_draws(arguments[15].toOptional<at::Tensor>());
  try {
    offset += generator.get_offset();
  } catch (const c10::Error&) {
    // Not known while a CUDA graph is captured: its draws are the same in each.
  }
  if (draws_anew) offset += kFar * new_draws;
  return generator.current_seed() * 0x9E3779B97F4A7C15ULL + offset;
}

namespace {

std::vector<c10::IValue> execute_with(const c10::OperatorHandle& handle, const Operation& operation,
                                      const std::vector<c10::IValue>& arguments, std::uint64_t seed,
                                      const Compounds& compounds, bool widened) {
  OnCpuArguments on_cpu(compounds, widened);
  std::vector<c10::IValue> stack;
  stack.reserve(arguments.size());
  for (const c10::IValue& argument : arguments) stack.push_back(on_cpu(argument));
  std::optional<DefaultGenerator> default_generator;
  if (operation.generator >= 0) {
    stack[static_cast<std::size_t>(operation.generator)] = at::detail::createCPUGenerator(seed);
  } else if (operation.random) {
    default_generator.emplace(seed);
  }
  // The CPU's default is another algorithm, which gives a rank as well.
  if (operation.name == "aten::linalg_lstsq" && stack[3].isNone()) stack[3] = std::string("gels");
  if (operation.counterpart != nullptr) {
    stack = operation.counterpart(stack);
  } else if (compounds.empty()) {
    handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  } else {
    handle.callBoxed(&stack);
  }
  on_cpu.write_back();
  return stack;
}

bool has_half(const std::vector<c10::IValue>& arguments) {
  bool found = false;
  for (const c10::IValue& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      found = found || (tensor.is_cuda() && is_plain(tensor) && is_half(tensor));
    });
  }
  return found;
}

}  // namespace

std::vector<c10::IValue> execute(const c10::OperatorHandle& handle, const Operation& operation,
                                 const std::vector<c10::IValue>& arguments, std::uint64_t seed,
                                 const Compounds& compounds) {
  try {
    return execute_with(handle, operation, arguments, seed, compounds, false);
  } catch (const std::exception&) {
    // Some of the CPU's kernels take no half, or not with what a GPU's kernel has saved in float.
    if (!has_half(arguments)) throw;
    return execute_with(handle, operation, arguments, seed, compounds, true);
  }
}

double expense_of(const Operation& operation, const std::vector<c10::IValue>& arguments) {
  const std::string_view name = operation.name;
  const auto tensor = [&](std::size_t index) -> const at::Tensor& {
    return arguments[index].toTensor();
  };
  const auto elements = [&](std::size_t index) {
    return index < arguments.size() && arguments[index].isTensor() && tensor(index).defined()
               ? static_cast<double>(tensor(index).numel())
               : 0.0;
  };
  if (name == "aten::mm" || name == "aten::bmm" || name == "aten::addmm" ||
      name == "aten::baddbmm") {
    const std::size_t first = name.starts_with("aten::add") || name == "aten::baddbmm" ? 1 : 0;
    return 2 * elements(first) * static_cast<double>(tensor(first + 1).size(-1));
  }
  if (name == "aten::convolution" || name == "aten::convolution_backward") {
    // Every element of the input meets at most every element of the weight of one input channel.
    const std::size_t input = name == "aten::convolution" ? 0 : 1;
    const at::Tensor& weight = tensor(input + 1);
    const double a_channel =
        weight.dim() > 1
            ? static_cast<double>(weight.numel() / std::max<std::int64_t>(weight.size(1), 1))
            : 0;
    return (input == 0 ? 2 : 4) * elements(input) * a_channel;
  }
  if (name == "aten::_cudnn_rnn" || name == "aten::_cudnn_rnn_backward") {
    double weights = 0;
    for_each_tensor(arguments[1], [&](const at::Tensor& weight) {
      weights += static_cast<double>(weight.numel());
    });
    const double steps =
        elements(0) / static_cast<double>(std::max<std::int64_t>(tensor(0).size(-1), 1));
    return (name == "aten::_cudnn_rnn" ? 2 : 6) * weights * steps;
  }
  if (name == "aten::linalg_vector_norm" || name == "aten::linalg_cross") return 0;
  if (name.starts_with("aten::_scaled_dot_product_")) {
    const std::size_t query = name.ends_with("_backward") ? 1 : 0;
    return (query == 0 ? 4 : 10) * elements(query) *
           static_cast<double>(tensor(query + 1).size(-2));
  }
  if (name.starts_with("aten::linalg_") || name.starts_with("aten::_linalg_") ||
      name.starts_with("aten::cholesky") || name == "aten::geqrf" ||
      name == "aten::triangular_solve" || name == "aten::_cdist_forward") {
    return arguments.empty() || !arguments[0].isTensor() || tensor(0).dim() == 0
               ? 0
               : 20 * elements(0) * static_cast<double>(tensor(0).size(-1));
  }
  return 0;
}

}  // namespace opacus_memprof::virtual_values
