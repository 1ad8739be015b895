// SPDX-License-Identifier: Apache-2.0
// One call of an operator on tensors of the virtual GPU.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <exception>
#include <vector>

#include "virtual_values/execute.h"
#include "virtual_values/operation.h"
#include "virtual_values/ranges.h"

namespace opacus_memprof::virtual_values {

class Call {
 public:
  // Takes note of the arguments, which are the last ones on the stack. Nothing is read yet.
  Call(const c10::OperatorHandle& handle, const Operation& operation,
       const torch::jit::Stack& stack);

  // Returns whether the call has tensors of the virtual GPU, all of which have bytes of their own.
  [[nodiscard]] bool concerns_us() const {
    return cuda_ && plain_ && (!operation_.compound || !compounds_.empty());
  }

  // Before the CUDA kernel: finds out what is known, and keeps the bytes of what will be written in
  // place, since the kernel may itself call operators that write there.
  void prepare();
  // Makes small inputs hold what they read as.
  void read_inputs();
  // A CUDA kernel may stop at what it finds on the device, where nothing is computed. Returns
  // whether the call can go on without: all that it does is to give results.
  [[nodiscard]] bool can_do_without_kernel() const;
  // New tensors of the virtual GPU with the shapes that the CPU gives the results.
  [[nodiscard]] std::vector<c10::IValue> results_of_cpu() const;
  // After the CUDA kernel: computes what can be computed, and notes the state of the results, which
  // are on the stack. Returns that state.
  State finish(torch::jit::Stack& stack);

  // What a real GPU ends the call with, for these values; nullptr if with nothing.
  [[nodiscard]] const std::exception_ptr& error() const { return error_; }

  // The lowest state of all inputs.
  [[nodiscard]] State state() const { return state_; }

 private:
  struct Tensor {
    at::Tensor tensor;
    Parameter parameter;
    std::size_t position;  // in a list, else 0
    bool in_list;
    bool indices;  // of a sparse tensor
    std::vector<std::uint8_t> before;
  };

  void note_read(const Tensor& each, State state);
  // What the elements of lists at this position are computed from, or the whole call.
  [[nodiscard]] State state_at(std::size_t position) const;
  [[nodiscard]] bool is_read_elsewhere(const Tensor& written) const;
  void restore();
  void prepare_compounds();
  [[nodiscard]] bool is_worth_executing(const torch::jit::Stack& stack, std::size_t returns) const;
  bool execute_whole(torch::jit::Stack& stack, std::size_t returns);
  void execute_lists(torch::jit::Stack& stack, std::size_t returns);
  bool execute_uniform(torch::jit::Stack& stack, std::size_t returns);
  // Returns how many of the `returns` results are stored.
  [[nodiscard]] std::size_t stored_of(std::size_t returns) const;
  void keep_for_backward(const at::Tensor& output, const c10::IValue& value) const;
  void store(const at::Tensor& output, const at::Tensor& value, State state) const;
  void store_compound(const at::Tensor& output, const at::Tensor& value, State state) const;
  [[nodiscard]] bool coalesce_indices(const at::Tensor& output);
  void note_results_not_computed(const torch::jit::Stack& stack, std::size_t returns);
  [[nodiscard]] bool is_written_argument(const at::Tensor& tensor) const;
  void note_arguments_written();

  const c10::OperatorHandle& handle_;
  const Operation& operation_;
  std::vector<c10::IValue> arguments_;
  std::vector<Tensor> tensors_;
  Compounds compounds_;  // of the CPU, from prepare() on
  bool cuda_ = false;
  bool plain_ = true;
  bool small_ = true;
  std::uint64_t seed_ = 0;
  State state_ = State::known;
  bool copies_parts_ = false;  // of a tensor that was computed in part: each element has its state
  std::exception_ptr error_;
  std::vector<State> states_;  // by position, of an operator on lists
};

}  // namespace opacus_memprof::virtual_values
