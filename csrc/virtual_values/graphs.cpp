// SPDX-License-Identifier: Apache-2.0
#include "virtual_values/graphs.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/List.h>
#include <c10/cuda/CUDAStream.h>
#include <dlfcn.h>

#include <exception>
#include <memory>
#include <unordered_map>
#include <utility>

#include "virtual_values/call.h"
#include "virtual_values/copy.h"
#include "virtual_values/execute.h"
#include "virtual_values/parts.h"
#include "virtual_values/tensors.h"

namespace opacus_memprof::virtual_values {
namespace {

template <typename Function>
Function* of_virtual_gpu(const char* name) {
  auto* const function = reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
  TORCH_CHECK(function != nullptr, "there is no virtual GPU in this process");
  return function;
}

bool add_work(void* stream, std::function<void()> work) {
  using Add = int(void*, void (*)(void*), void*, void (*)(void*));
  static Add* const add = of_virtual_gpu<Add>("memprof_virtual_gpu_add_work");
  auto kept = std::make_unique<std::function<void()>>(std::move(work));
  const bool added =
      add(
          stream, [](void* data) { (*static_cast<std::function<void()>*>(data))(); }, kept.get(),
          [](void* data) { delete static_cast<std::function<void()>*>(data); }) != 0;
  if (added) kept.release();  // NOLINT(bugprone-unused-return-value)
  return added;
}

void* stream_of(const std::vector<c10::IValue>& arguments) {
  c10::DeviceIndex device = -1;
  for (const c10::IValue& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (device < 0 && tensor.is_cuda()) device = tensor.device().index();
    });
  }
  return c10::cuda::getCurrentCUDAStream(device).stream();
}

// Tensors over the same memory that do not own it: a graph's memory is handed out again within it.
class Unowned {
 public:
  c10::IValue operator()(const c10::IValue& value) {
    return with_tensors(value, [this](const at::Tensor& tensor) { return of(tensor); });
  }

 private:
  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    at::Tensor& made = made_[tensor.unsafeGetTensorImpl()];
    if (!made.defined()) made = make(tensor);
    return made;
  }

  static at::Tensor make(const at::Tensor& tensor) {
    // A number of the host is a constant of the graph.
    if (tensor.is_cpu() && tensor.dim() == 0) {
      const OnCpu on_cpu;
      at::Tensor copy = tensor.clone();
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
        copy.unsafeGetTensorImpl()->set_wrapped_number(true);
      return copy;
    }
    TORCH_CHECK(is_plain(tensor) || (tensor.is_cpu() && tensor.layout() == at::kStrided &&
                                     tensor.has_storage() && !is_wrapper(tensor)),
                "not one piece of memory");
    return alias_on(tensor, tensor.device());
  }

  std::unordered_map<const c10::TensorImpl*, at::Tensor> made_;
};

struct Captured {
  c10::OperatorHandle handle;
  const Operation& operation;
  std::vector<c10::IValue> arguments;
  std::vector<c10::IValue> results;

  void execute() const {
    torch::jit::Stack stack = arguments;
    if (operation.kind == Kind::copy && is_copy_between_host_and_device(stack)) {
      copy_values_between_host_and_device(stack);
      return;
    }
    Call call(handle, operation, stack);
    if (!call.concerns_us()) return;
    const NewDraw new_draw;
    call.prepare();
    stack = results;
    call.finish(stack);
  }
};

}  // namespace

bool is_capturing() {
  static int (*const capturing)() = of_virtual_gpu<int()>("memprof_virtual_gpu_capturing");
  return capturing() != 0;
}

bool is_captured(const std::vector<c10::IValue>& arguments) {
  return add_work(stream_of(arguments), [] {});
}

void capture_call(const c10::OperatorHandle& handle, const Operation& operation,
                  const std::vector<c10::IValue>& arguments,
                  const std::vector<c10::IValue>& results) {
  Unowned unowned;
  const auto all = [&](const std::vector<c10::IValue>& values) {
    std::vector<c10::IValue> made;
    made.reserve(values.size());
    for (const c10::IValue& value : values) made.push_back(unowned(value));
    return made;
  };
  std::function<void()> work;
  try {
    auto captured =
        std::make_shared<const Captured>(Captured{handle, operation, all(arguments), all(results)});
    work = [captured] { captured->execute(); };
  } catch (const std::exception&) {
    // It cannot be executed again, so the values that it writes are unknown.
    std::vector<at::Tensor> written;
    const auto take = [&](const at::Tensor& part) {
      written.push_back(alias_on(part, part.device()));
    };
    for (const c10::IValue& result : results) for_each_part(result, take);
    for (std::size_t index = 0; index < operation.parameters.size(); ++index) {
      if (operation.parameters[index].written) for_each_part(arguments[index], take);
    }
    work = [written] {
      for (const at::Tensor& tensor : written) note_not_computed(tensor);
    };
  }
  add_work(stream_of(arguments), std::move(work));
}

void note_written_by_kernel(const at::Tensor& tensor) {
  if (!is_plain(tensor)) return;
  const at::Tensor unowned = alias_on(tensor, tensor.device());
  if (is_capturing() && add_work(stream_of({tensor}), [unowned] { note_not_computed(unowned); }))
    return;
  note_not_computed(tensor);
}

bool capture_allocation(void* stream, std::function<void()> work) {
  return is_capturing() && add_work(stream, std::move(work));
}

}  // namespace opacus_memprof::virtual_values
