// SPDX-License-Identifier: Apache-2.0
// The part of a call on lists of tensors (`_foreach_*`, fused optimizers) whose tensors are small.
#pragma once

#include <ATen/core/ivalue.h>

#include <algorithm>
#include <cstddef>
#include <vector>

namespace opacus_memprof::virtual_values {

class SmallPart {
 public:
  // Of lists that are as long as the first one, the positions at which all of them have small
  // tensors.
  explicit SmallPart(const std::vector<c10::IValue>& arguments);

  // Nothing can be executed: there are none, or another tensor of the call is large.
  [[nodiscard]] bool empty() const { return kept_.empty(); }
  [[nodiscard]] bool keeps(std::size_t position) const {
    return std::find(kept_.begin(), kept_.end(), position) != kept_.end();
  }
  // The call's, with what was not kept left out of lists.
  [[nodiscard]] std::vector<c10::IValue> arguments() const;

  // Calls function(output, value, position) for the results of the whole call and of the part that
  // belong together.
  template <typename Function>
  void for_each_result(const c10::IValue& outputs, const c10::IValue& values,
                       Function&& function) const {
    if (!outputs.isTensorList() || !values.isTensorList()) return;
    const auto all = outputs.toTensorVector();
    const auto part = values.toTensorVector();
    if (all.size() != length_ || part.size() != kept_.size()) return;
    for (std::size_t index = 0; index < kept_.size(); ++index)
      function(all[kept_[index]], part[index], kept_[index]);
  }

 private:
  std::vector<c10::IValue> all_;
  std::size_t length_ = 0;
  std::vector<std::size_t> kept_;
};

}  // namespace opacus_memprof::virtual_values
