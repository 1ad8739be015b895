// SPDX-License-Identifier: Apache-2.0
#include "clipping/gradient_tap.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <concepts>
#include <memory>
#include <string>
#include <utility>

namespace opacus_memprof::clipping {

namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// A pointer to a new node, of the type that this version of torch uses in graphs.
template <typename T, typename... Arguments>
auto make_node(Arguments&&... arguments) {
  if constexpr (std::derived_from<T, c10::intrusive_ptr_target>) {
    return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
  } else {  // its destruction must not recurse through a deep graph
    return std::shared_ptr<T>(new T(std::forward<Arguments>(arguments)...),
                              [](T* node) { deleteNode(node); });
  }
}

// Disables autocast while it lives: backward may be called under autocast, but the input has
// already been cast in forward.
class WithoutAutocast {
 public:
  explicit WithoutAutocast(at::DeviceType device)
      : device_(device), was_enabled_(at::autocast::is_autocast_enabled(device)) {
    if (was_enabled_) at::autocast::set_autocast_enabled(device_, false);
  }
  WithoutAutocast(const WithoutAutocast&) = delete;
  WithoutAutocast& operator=(const WithoutAutocast&) = delete;
  ~WithoutAutocast() {
    if (was_enabled_) at::autocast::set_autocast_enabled(device_, true);
  }

 private:
  at::DeviceType device_;
  bool was_enabled_;
};

// Returns the gradient, of which no second derivative can be computed.
at::Tensor once_differentiable(const at::Tensor& gradient) {
  if (!gradient.requires_grad()) return gradient;
  const auto error = make_node<torch::autograd::Error>(
      "trying to differentiate twice a function that was marked with @once_differentiable",
      torch::autograd::collect_next_edges(gradient));
  at::Tensor detached = gradient.detach();
  torch::autograd::set_history(detached, error);
  return detached;
}

class GradientTap final : public Node {
 public:
  GradientTap(pybind11::object receive, pybind11::object call, bool is_anchored)
      : receive_(std::move(receive)), call_(std::move(call)), is_anchored_(is_anchored) {}
  GradientTap(const GradientTap&) = delete;
  GradientTap& operator=(const GradientTap&) = delete;
  ~GradientTap() override {
    pybind11::handle receive = receive_.release();
    pybind11::handle call = call_.release();
    if (Py_IsInitialized() == 0) return;  // at exit they are freed with the interpreter
    const pybind11::gil_scoped_acquire gil;
    receive.dec_ref();
    call.dec_ref();
  }

  void save(const at::Tensor& input) {
    input_ = SavedVariable(input.detach(), /*is_output=*/false);
    has_input_ = true;
  }

  variable_list apply(variable_list&& gradients) override {
    at::Tensor gradient = std::move(gradients[0]);
    if (!gradient.defined()) gradient = input_metadata(0).zeros_like();
    const at::Tensor input = has_input_ ? input_.unpack(getptr()) : at::Tensor();
    // Only a backward with create_graph=True passes on a gradient that requires grad.
    const bool is_graph_created = at::GradMode::is_enabled();
    if (gradient.requires_grad() || !is_backward_of_inputs()) {
      const at::NoGradGuard no_grad;
      const WithoutAutocast no_autocast(gradient.device().type());
      const bool is_detached = gradient.requires_grad() && !is_graph_created;
      pass_on(input, is_detached ? gradient.detach() : gradient);
    }
    if (is_anchored_) return {at::Tensor()};
    if (is_graph_created) gradient = once_differentiable(gradient);
    return {std::move(gradient)};
  }

  void release_variables() override { input_.reset_data(); }
  [[nodiscard]] std::string name() const override { return "GradientTap"; }

 private:
  void pass_on(const at::Tensor& input, const at::Tensor& gradient) const {
    const pybind11::gil_scoped_acquire gil;
    const auto x = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(input));
    const auto g = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(gradient));
    PyObject* const arguments[] = {call_.ptr(), x.ptr(), g.ptr()};
    PyObject* none = PyObject_Vectorcall(receive_.ptr(), arguments, 3, nullptr);
    if (none == nullptr) throw python_error();
    Py_DECREF(none);
  }

  pybind11::object receive_;
  pybind11::object call_;
  bool is_anchored_;  // the gradient that it returns is not used
  SavedVariable input_;
  bool has_input_ = false;
};

}  // namespace

bool is_backward_of_inputs() {
  const auto* nodes = torch::autograd::get_current_graph_task_exec_info();
  return nodes != nullptr && !nodes->empty();
}

at::Tensor tap_gradient(const at::Tensor& output, const std::optional<at::Tensor>& anchor,
                        const std::optional<at::Tensor>& input, pybind11::object receive,
                        pybind11::object call) {
  const auto node = make_node<GradientTap>(std::move(receive), std::move(call), anchor.has_value());
  node->set_next_edges(torch::autograd::collect_next_edges(anchor ? *anchor : output));
  if (input) node->save(*input);
  at::Tensor result;
  {
    const at::NoGradGuard no_grad;
    result = output.detach();
  }
  torch::autograd::set_history(result, node);
  return result;
}

}  // namespace opacus_memprof::clipping
