// SPDX-License-Identifier: Apache-2.0
#include "hooks/gradient_hook.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <memory>
#include <utility>

#include "allocators/tensor.h"
#include "core/recorder.h"

namespace opacus_memprof {

namespace {

using torch::autograd::PostAccumulateGradHook;

std::atomic<std::uint64_t> lost_hooks{0};

class GradientHook final : public PostAccumulateGradHook {
 public:
  GradientHook(std::uint16_t module, std::unique_ptr<PostAccumulateGradHook> existing_hooks)
      : module_(module), existing_hooks_(std::move(existing_hooks)) {}
  GradientHook(const GradientHook&) = delete;
  GradientHook& operator=(const GradientHook&) = delete;
  ~GradientHook() override {
    if (!detached_) ++lost_hooks;
  }

  [[gnu::hot]] void operator()(const at::Tensor& parameter) override {
    retag_tensor(parameter.grad(), static_cast<std::uint8_t>(Category::gradients), module_);
    if (existing_hooks_ != nullptr) (*existing_hooks_)(parameter);  // may drop the gradient
  }

  // Compiled autograd cannot run our hook, for which the base class would raise: it gets the
  // existing hooks only.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    if (existing_hooks_ != nullptr) existing_hooks_->compiled_args(args);
  }
  void apply_with_saved(at::Tensor& parameter,
                        torch::dynamo::autograd::SwapSavedVariables& saved) override {
    if (existing_hooks_ != nullptr) existing_hooks_->apply_with_saved(parameter, saved);
  }

  std::unique_ptr<PostAccumulateGradHook> detach() {
    detached_ = true;
    return std::move(existing_hooks_);
  }

 private:
  std::uint16_t module_;
  std::unique_ptr<PostAccumulateGradHook> existing_hooks_;
  bool detached_ = false;
};

// nullptr if there is none.
GradientHook* hook_at(PyObject* object) {
  if (!THPVariable_Check(object)) return nullptr;
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (torch::autograd::impl::get_autograd_meta(tensor) == nullptr) return nullptr;
  return dynamic_cast<GradientHook*>(torch::autograd::impl::post_acc_grad_hooks(tensor).get());
}

}  // namespace

void follow_gradient(PyObject* parameter, std::uint16_t module) {
  if (!THPVariable_Check(parameter)) return;
  unfollow_gradient(parameter);
  const at::Tensor& tensor = THPVariable_Unpack(parameter);
  std::unique_ptr<PostAccumulateGradHook> existing_hooks;
  if (torch::autograd::impl::get_autograd_meta(tensor) != nullptr) {
    existing_hooks = std::move(torch::autograd::impl::post_acc_grad_hooks(tensor));
  }
  torch::autograd::impl::set_post_acc_grad_hooks(
      tensor, std::make_unique<GradientHook>(module, std::move(existing_hooks)));
}

void unfollow_gradient(PyObject* parameter) {
  GradientHook* ours = hook_at(parameter);
  if (ours == nullptr) return;
  torch::autograd::impl::set_post_acc_grad_hooks(THPVariable_Unpack(parameter), ours->detach());
}

std::uint64_t gradient_hooks_lost() noexcept { return lost_hooks; }

}  // namespace opacus_memprof
