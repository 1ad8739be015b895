// SPDX-License-Identifier: Apache-2.0
#include "clipping/operation_log.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string_view>

#include "clipping/hashing.h"

namespace opacus_memprof::clipping {
namespace {

// A number that has changed more often, such as one that is annealed, is left out.
constexpr int kMostChanges = 8;
constexpr std::int64_t kMostDimensions = 8;
constexpr std::size_t kMostSequences = 4096;
constexpr std::size_t kMostOperations = 1 << 20;  // of a record that nothing ends

// The integers of these depend on the lengths of samples, or on their number.
bool has_sizes(std::string_view name) {
  static const std::unordered_set<std::string_view> kNames = {
      "aten::_efficientzerotensor",
      "aten::_pad_packed_sequence",
      "aten::_reshape_alias",
      "aten::_unsafe_view",
      "aten::arange",
      "aten::as_strided",
      "aten::bincount",
      "aten::broadcast_to",
      "aten::chunk",
      "aten::constant_pad_nd",
      "aten::diag_embed",
      "aten::diagonal",
      "aten::empty",
      "aten::empty_strided",
      "aten::expand",
      "aten::expand_as",
      "aten::eye",
      "aten::full",
      "aten::linspace",
      "aten::narrow",
      "aten::new_empty",
      "aten::new_empty_strided",
      "aten::new_full",
      "aten::new_ones",
      "aten::new_zeros",
      "aten::one_hot",
      "aten::ones",
      "aten::pad",
      "aten::rand",
      "aten::randint",
      "aten::randn",
      "aten::randperm",
      "aten::repeat",
      "aten::repeat_interleave",
      "aten::reshape",
      "aten::resize_",
      "aten::select",
      "aten::select_backward",
      "aten::size",
      "aten::slice",
      "aten::slice_backward",
      "aten::split",
      "aten::split_with_sizes",
      "aten::tensor_split",
      "aten::topk",
      "aten::tril",
      "aten::triu",
      "aten::unflatten",
      "aten::unfold",
      "aten::unsafe_split",
      "aten::view",
      "aten::zeros",
  };
  return kNames.count(name) != 0;
}

std::uint64_t bits(double value) { return std::bit_cast<std::uint64_t>(value); }

bool is_readable(const at::Tensor& tensor) {
  const at::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return impl.has_storage() && tensor.is_cpu() && !impl.is_python_dispatch();
}

// A number that Python has written beside a tensor. Read without an operation, which would be
// recorded.
std::uint64_t number_in(const at::Tensor& tensor) {
  const void* data = tensor.const_data_ptr();
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return mix(1, bits(*static_cast<const float*>(data)));
    case at::kDouble:
      return mix(1, bits(*static_cast<const double*>(data)));
    case at::kLong:
      return mix(2, static_cast<std::uint64_t>(*static_cast<const std::int64_t*>(data)));
    case at::kBool:
      return mix(3, static_cast<std::uint64_t>(*static_cast<const bool*>(data)));
    case at::kComplexDouble: {
      const auto value = *static_cast<const c10::complex<double>*>(data);
      return mix(mix(4, bits(value.real())), bits(value.imag()));
    }
    default:
      return 0;
  }
}

// A tensor that Python has made of a number, on the CPU or on its way to another device.
bool is_made_of_number(const char* operation, c10::ArrayRef<const c10::IValue> inputs) {
  if (inputs.empty() || !inputs[0].isTensor()) return false;
  const at::Tensor& tensor = inputs[0].toTensor();
  if (!tensor.defined() || !is_readable(tensor) || tensor.numel() != 1) return false;
  if (std::string_view(operation) == "aten::lift_fresh") return true;
  return std::any_of(inputs.begin(), inputs.end(), [](const c10::IValue& each) {
    return each.isDevice() && !each.toDevice().is_cpu();
  });
}

std::uint64_t hash_of(const c10::IValue& value, const char* operation) {
  if (value.isDouble()) return mix(1, bits(value.toDouble()));
  if (value.isBool()) return mix(3, static_cast<std::uint64_t>(value.toBool()));
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) return 0;
    const bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    return is_number && is_readable(tensor) ? number_in(tensor) : 0;
  }
  if (value.isInt() && !has_sizes(operation)) {
    return mix(2, static_cast<std::uint64_t>(value.toInt()));
  }
  if (value.isIntList() && !has_sizes(operation)) {
    std::uint64_t hash = 5;
    for (const std::int64_t each : value.toIntVector()) {
      if (std::abs(each) > kMostDimensions) return 0;
      hash = mix(hash, static_cast<std::uint64_t>(each));
    }
    return hash;
  }
  return 0;
}

}  // namespace

thread_local OperationLog::Recording OperationLog::recording_;

void OperationLog::Recording::end() {
  if (record == nullptr) return;
  at::removeCallback(callback);
  record->is_open = false;
  record = nullptr;
}

OperationLog::~OperationLog() {
  if (record_ != nullptr) end(false);
}

void OperationLog::begin(bool with_inner) {
  recording_.end();  // of a forward that has raised an error, or one that another thread has ended
  last_.clear();
  record_ = std::make_shared<Record>();
  record_->with_inner = with_inner;
  recording_.record = record_;
  const auto leave = with_inner ? nullptr : &OperationLog::leave;
  recording_.callback =
      at::addThreadLocalCallback(at::RecordFunctionCallback(&OperationLog::record, leave)
                                     .needsInputs(true)
                                     .scopes({at::RecordScope::FUNCTION}));
}

bool OperationLog::end(bool is_ordered) {
  const std::shared_ptr<Record> ended = std::move(record_);
  if (ended == nullptr) return false;
  record_ = nullptr;
  if (recording_.record != ended) return ended->is_open.exchange(false);
  recording_.end();
  last_ = std::move(ended->operations);
  if (sequences_.count(ended->sequence) != 0) return false;
  if (has_unknown(is_ordered)) return true;
  if (sequences_.size() < kMostSequences) sequences_.insert(ended->sequence);
  return false;
}

void OperationLog::learn() {
  const bool is_first = contexts_.empty();
  std::unordered_set<std::uint64_t> changed;
  const auto add = [&](std::uint64_t key, std::uint64_t value) {
    Numbers& known = numbers_[key];
    if (known.values.insert(value).second && !is_first && changed.insert(key).second) {
      ++known.changes;
    }
  };
  std::unordered_map<std::uint64_t, std::uint64_t> counts;
  for (const Operation& each : last_) {
    contexts_.insert(each.context);
    if (each.numbers == 0) continue;
    add(each.context, each.numbers);
    add(mix(each.context, ++counts[each.context]), each.numbers);
  }
}

bool OperationLog::has_unknown(bool is_ordered) const {
  std::unordered_map<std::uint64_t, std::uint64_t> counts;  // by context
  for (const Operation& each : last_) {
    if (contexts_.count(each.context) == 0) return true;
    if (each.numbers == 0) continue;
    const std::uint64_t key = is_ordered ? mix(each.context, ++counts[each.context]) : each.context;
    if (is_unknown(key, each.numbers)) return true;
  }
  return false;
}

bool OperationLog::is_unknown(std::uint64_t key, std::uint64_t value) const {
  const auto known = numbers_.find(key);
  if (known == numbers_.end()) return true;
  return known->second.changes <= kMostChanges && known->second.values.count(value) == 0;
}

std::unique_ptr<at::ObserverContext> OperationLog::record(const at::RecordFunction& operation) {
  Record* const own = recording_.record.get();
  if (own == nullptr || !own->is_open) return nullptr;
  if (!own->with_inner && own->depth++ > 0) return nullptr;
  if (own->operations.size() == kMostOperations) return nullptr;
  const char* const name = operation.name();
  // An operator is known by its overload, which is never moved. What torch records under a string
  // ("detach") has that string on the stack, elsewhere in each call, and shares one overload.
  const auto overload = reinterpret_cast<std::uintptr_t>(operation.overload_name());
  const std::uint64_t id = mix(std::hash<std::string_view>{}(name), overload);
  const std::uint64_t context = mix(mix(mix(0, own->before_that), own->before), id);
  own->before_that = own->before;
  own->before = id;
  std::uint64_t numbers = 0;
  const auto inputs = operation.inputs();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (const std::uint64_t hash = hash_of(inputs[i], name); hash != 0) {
      numbers = mix(mix(numbers, i), hash);
    }
  }
  if (is_made_of_number(name, inputs)) numbers = mix(numbers, number_in(inputs[0].toTensor()));
  own->sequence = mix(mix(own->sequence, context), numbers);
  own->operations.push_back({context, numbers});
  return nullptr;
}

void OperationLog::leave(const at::RecordFunction& /*operation*/,
                         at::ObserverContext* /*context*/) {
  Record* const own = recording_.record.get();
  if (own != nullptr && own->depth > 0) --own->depth;
}

}  // namespace opacus_memprof::clipping
