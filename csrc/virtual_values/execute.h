// SPDX-License-Identifier: Apache-2.0
// Carries an operator out on the CPU, over the bytes of tensors of the virtual GPU.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "virtual_values/operation.h"

namespace opacus_memprof::virtual_values {

// While it lives, this thread's operators see CPU tensors only, and nothing of what the program has
// set for its own: autograd, modes, autocast, profilers. Nor does the profiler count what they
// allocate.
class OnCpu {
 public:
  OnCpu();
  OnCpu(const OnCpu&) = delete;
  OnCpu& operator=(const OnCpu&) = delete;
  ~OnCpu();

 private:
  struct State;
  State* state_;
};

// While it lives, draws of this thread give other values than before, from the same state of the
// generator: a graph's draws differ from replay to replay.
class NewDraw {
 public:
  NewDraw();
  ~NewDraw();
  NewDraw(const NewDraw&) = delete;
  NewDraw& operator=(const NewDraw&) = delete;
};

// What seeds the draws of this call, so that a program that seeds CUDA's generator gets the same
// values again. Asked before the CUDA kernel, which advances the generator.
std::uint64_t seed_of_draw(const Operation& operation, const std::vector<c10::IValue>& arguments);

// Compound tensors, and the tensors of the CPU that stand for them.
using Compounds = std::vector<std::pair<at::Tensor, at::Tensor>>;

// The results of the operator for these arguments, with CUDA tensors and devices in them replaced
// by the CPU's, in float where the CPU has no kernel for half. What the operator writes in place is
// written. Throws what the CPU kernel throws.
std::vector<c10::IValue> execute(const c10::OperatorHandle& handle, const Operation& operation,
                                 const std::vector<c10::IValue>& arguments, std::uint64_t seed,
                                 const Compounds& compounds = {});

// Floating-point operations that the call would take on the CPU, roughly; 0 where they are as many
// as elements.
double expense_of(const Operation& operation, const std::vector<c10::IValue>& arguments);

}  // namespace opacus_memprof::virtual_values
