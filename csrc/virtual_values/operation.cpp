// SPDX-License-Identifier: Apache-2.0
#include "virtual_values/operation.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace opacus_memprof::virtual_values {
namespace {

template <std::size_t size>
bool contains(const std::array<std::string_view, size>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// They have no kernel of their own for CUDA, and are computed as a whole: the innermost operators
// of which they are made have no kernel for the CPU, or there are none.
constexpr std::array<std::string_view, 6> kWhole{
    "aten::convolution", "aten::convolution_backward", "aten::conj_physical_", "aten::ldexp",
    "aten::ldexp_",      "aten::kaiser_window"};

// They change what a tensor is, not its values.
constexpr std::array<std::string_view, 15> kNoValues{
    "aten::set_", "aten::resize_", "aten::resize_as_", "aten::resize_as_sparse_",
    "aten::record_stream", "aten::_pin_memory", "aten::is_pinned", "aten::is_set_to",
    "aten::_lazy_clone",
    // Copies the weights into one piece of memory, by operators that are seen.
    "aten::_cudnn_rnn_flatten_weight",
    // Their results share the memory of their arguments.
    "aten::_sparse_coo_tensor_with_dims_and_tensors", "aten::_sparse_coo_tensor_with_dims",
    "aten::_sparse_compressed_tensor_with_dims", "aten::_coalesced_", "aten::sparse_resize_"};

constexpr std::array<c10::DispatchKey, 4> kCompound{
    c10::DispatchKey::SparseCUDA, c10::DispatchKey::SparseCsrCUDA,
    c10::DispatchKey::NestedTensorCUDA, c10::DispatchKey::QuantizedCUDA};

bool has_kernel(const c10::OperatorHandle& handle) {
  return handle.hasKernelForDispatchKey(c10::DispatchKey::CUDA);
}

bool has_compound_kernel(const c10::OperatorHandle& handle) {
  return std::any_of(kCompound.begin(), kCompound.end(),
                     [&](auto key) { return handle.hasKernelForDispatchKey(key); });
}

constexpr std::array<std::string_view, 2> kFresh{"aten::empty", "aten::empty_strided"};

// The first argument is overwritten without being read.
constexpr std::array<std::string_view, 13> kOverwrite{
    "aten::copy_",         "aten::fill_",       "aten::zero_",      "aten::normal_",
    "aten::uniform_",      "aten::random_",     "aten::bernoulli_", "aten::exponential_",
    "aten::cauchy_",       "aten::log_normal_", "aten::geometric_", "aten::_foreach_copy_",
    "aten::_foreach_zero_"};

// Results that are arguments, and that are not read either.
constexpr std::array<std::string_view, 2> kFillsArguments{"aten::_cummax_helper",
                                                          "aten::_cummin_helper"};

// The argument that holds what rrelu has drawn.
constexpr std::string_view kDrawn = "noise";

// Elements of the first argument that indices or a mask name are overwritten.
constexpr std::array<std::string_view, 8> kWriteInPart{
    "aten::index_put_",  "aten::_index_put_impl_", "aten::scatter_",        "aten::index_copy_",
    "aten::index_fill_", "aten::masked_fill_",     "aten::masked_scatter_", "aten::put_"};

// They write their averages, which the schemas of most of them do not say.
constexpr std::array<std::string_view, 6> kUpdatesAverages{
    "aten::native_batch_norm",       "aten::_native_batch_norm_legit",
    "aten::cudnn_batch_norm",        "aten::batch_norm_gather_stats",
    "aten::batch_norm_update_stats", "aten::batch_norm_gather_stats_with_counts"};
constexpr std::array<std::string_view, 2> kAverages{"running_mean", "running_var"};

// What cuDNN's recurrent layers hold for themselves, beside the weights.
constexpr std::array<std::string_view, 3> kOfRecurrent{"weight_buf", "dropout_state", "reserve"};

// beta * the first argument + a product: a beta of 0 lets programs pass memory that was not
// written.
constexpr std::array<std::string_view, 5> kScalesFirst{"aten::addmm", "aten::addmv", "aten::addr",
                                                       "aten::addbmm", "aten::baddbmm"};

constexpr std::array<std::string_view, 7> kReducesUniform{
    "aten::all", "aten::any", "aten::amax", "aten::amin", "aten::max", "aten::min", "aten::mean"};

constexpr std::array<std::string_view, 5> kCountsOnDevice{"aten::nonzero", "aten::_unique2",
                                                          "aten::_unique", "aten::unique_dim",
                                                          "aten::unique_consecutive"};

// An operator is pointwise if one of its overloads is tagged so: those with `out` and those in
// place often are not.
std::string without_underscore(std::string name) {
  if (name.ends_with('_')) name.pop_back();
  return name;
}

const std::unordered_set<std::string>& pointwise_names() {
  static const auto& names = *[] {
    auto* const found = new std::unordered_set<std::string>{"aten::fill", "aten::zero",
                                                            "aten::copy", "aten::masked_fill"};
    for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
      const auto handle = c10::Dispatcher::singleton().findSchema(name);
      if (handle && handle->hasTag(at::Tag::pointwise))
        found->insert(without_underscore(name.name));
    }
    return found;
  }();
  return names;
}

bool gives_views(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const auto& returned) {
    return returned.alias_info() != nullptr && !returned.alias_info()->isWrite();
  });
}

Kind kind_of(const c10::OperatorHandle& handle) {
  const std::string& name = handle.operator_name().name;
  if (name.starts_with("c10d::")) return Kind::collective;
  if (contains(kNoValues, name)) return Kind::pass;
  if (contains(kFresh, name)) return Kind::fresh;
  if (name == "aten::lift_fresh") return Kind::from_host;
  if (name == "aten::copy_") return Kind::copy;
  if (!has_kernel(handle) && !has_compound_kernel(handle) && !contains(kWhole, name)) {
    return Kind::pass;
  }
  if (gives_views(handle.schema())) return Kind::pass;
  if (name == "aten::_local_scalar_dense") return Kind::item;
  if (name == "aten::equal") return Kind::equal;
  return Kind::compute;
}

Operation describe(const c10::OperatorHandle& handle) {
  Operation operation;
  operation.kind = kind_of(handle);
  operation.name = handle.operator_name().name;
  if (operation.kind == Kind::pass) return operation;
  const auto& schema = handle.schema();
  const bool recurrent = operation.name.starts_with("aten::_cudnn_rnn");
  if (operation.name == "aten::_cudnn_rnn") operation.kept = 3;
  for (const auto& argument : schema.arguments()) {
    const bool average =
        contains(kAverages, argument.name()) && contains(kUpdatesAverages, operation.name);
    const bool written =
        average || (argument.alias_info() != nullptr && argument.alias_info()->isWrite());
    const bool first = written && operation.parameters.empty();
    operation.parameters.push_back(
        {.written = written,
         .read = !argument.is_out() && !(first && contains(kOverwrite, operation.name)) &&
                 !(written && contains(kFillsArguments, operation.name)) &&
                 !(written && argument.name() == kDrawn),
         .written_in_part = first && contains(kWriteInPart, operation.name),
         .passed_over = recurrent && contains(kOfRecurrent, argument.name()),
         .average = average});
    if (argument.name() == "beta" && contains(kScalesFirst, without_underscore(operation.name))) {
      operation.beta = static_cast<int>(operation.parameters.size()) - 1;
    }
    if (argument.name() == "momentum_buffer_list") {
      operation.momenta = static_cast<int>(operation.parameters.size()) - 1;
    }
    if (argument.name() == "training") {
      operation.training = static_cast<int>(operation.parameters.size()) - 1;
    }
    if (argument.name() == "is_first_step") {
      operation.first_step = static_cast<int>(operation.parameters.size()) - 1;
    }
    const c10::TypePtr& type = argument.type();
    if (type->kind() == c10::TypeKind::GeneratorType ||
        (type->kind() == c10::TypeKind::OptionalType &&
         type->castRaw<c10::OptionalType>()->getElementType()->kind() ==
             c10::TypeKind::GeneratorType)) {
      operation.generator = static_cast<int>(operation.parameters.size()) - 1;
    }
  }
  operation.random =
      recurrent || handle.hasTag(at::Tag::nondeterministic_seeded) || operation.generator >= 0;
  operation.counterpart = counterpart_of(toString(handle.operator_name()));
  operation.compound =
      !has_kernel(handle) && !contains(kWhole, operation.name) && operation.kind == Kind::compute;
  operation.on_cpu = operation.counterpart != nullptr ||
                     handle.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  operation.pointwise = pointwise_names().contains(without_underscore(operation.name));
  operation.reduces_uniform = contains(kReducesUniform, operation.name);
  const auto& arguments = schema.arguments();
  // _foreach_pow also takes a number and a list.
  const bool list_first =
      !arguments.empty() && arguments[0].type()->kind() == c10::TypeKind::ListType;
  operation.lists =
      list_first &&
      (operation.name.starts_with("aten::_foreach_") ||
       operation.name.starts_with("aten::_fused_ada") || operation.name == "aten::_fused_sgd_" ||
       operation.name == "aten::_amp_foreach_non_finite_check_and_unscale_");
  operation.counts_on_device = contains(kCountsOnDevice, operation.name);
  operation.dynamic_shape =
      operation.counts_on_device || handle.hasTag(at::Tag::dynamic_output_shape);
  return operation;
}

}  // namespace

const Operation& operation_of(const c10::OperatorHandle& handle) {
  static std::mutex mutex;
  static auto& all = *new std::unordered_map<c10::OperatorHandle, std::unique_ptr<const Operation>>;
  thread_local std::unordered_map<c10::OperatorHandle, const Operation*> mine;
  const Operation*& operation = mine[handle];
  if (operation == nullptr) {
    const std::lock_guard lock(mutex);
    auto& shared = all[handle];
    if (shared == nullptr) shared = std::make_unique<const Operation>(describe(handle));
    operation = shared.get();
  }
  return *operation;
}

bool is_seen(const c10::OperatorHandle& handle) { return kind_of(handle) != Kind::pass; }

}  // namespace opacus_memprof::virtual_values
