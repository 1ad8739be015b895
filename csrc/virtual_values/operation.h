// SPDX-License-Identifier: Apache-2.0
// Properties of an operator that must be known before one of its calls can be executed, read from
// its schema once.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

#include "virtual_values/counterparts.h"

namespace opacus_memprof::virtual_values {

enum class Kind {
  pass,        // views, metadata, and operators that only call other operators
  fresh,       // allocates memory without writing it
  from_host,   // torch.tensor(): the copy from the host that it returns is not intercepted
  collective,  // of c10d: its results would come from other processes
  copy,
  item,   // the host reads one element
  equal,  // the host reads whether two tensors are equal
  compute,
};

struct Parameter {
  bool written = false;
  bool read = true;  // false for `out`, and for arguments that are overwritten completely
  bool written_in_part = false;  // by indices or a mask; other elements keep their values
  bool passed_over = false;      // the CPU does not need its values, so its size does not matter
  bool average = false;          // of a normalization, which writes it only in training
};

struct Operation {
  Kind kind = Kind::pass;
  std::string name;  // as in "aten::add", without the overload
  std::vector<Parameter> parameters;
  int generator = -1;  // the position of its Generator parameter
  int beta = -1;       // of the factor of the first argument, which is not read if it is 0
  int momenta = -1;    // of an optimizer's buffers, which its first step does not read
  int first_step = -1;
  int training = -1;  // of a normalization that has averages
  int kept = -1;      // of a result that only its own backward reads; those after it are arguments
  bool random = false;    // draws from a generator, which may be the default one
  bool on_cpu = false;    // there is a kernel for the CPU, or a counterpart
  bool compound = false;  // has a kernel for sparse, nested or quantized tensors alone
  Counterpart counterpart = nullptr;
  bool pointwise = false;
  bool reduces_uniform = false;  // a reduction that gives x for a tensor whose elements are all x
  bool lists = false;            // works on lists of tensors, element by element
  // The shape of the result depends on data, and the CUDA kernel finds it in memory that nothing
  // has written.
  bool counts_on_device = false;
  bool dynamic_shape = false;  // the shape depends on data, however it is found
};

// Thread safe; the reference stays valid.
const Operation& operation_of(const c10::OperatorHandle& handle);

// Returns whether calls must be intercepted. Calls of an operator that only calls other operators
// need not: the others are intercepted.
bool is_seen(const c10::OperatorHandle& handle);

}  // namespace opacus_memprof::virtual_values
