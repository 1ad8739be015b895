// SPDX-License-Identifier: Apache-2.0
// What stands in on the CPU for cuDNN's LSTM, GRU and RNN, and for the fused cells of LSTM and GRU.
#pragma once

#include <string_view>

#include "virtual_values/counterparts.h"

namespace opacus_memprof::virtual_values {

// nullptr for other operators.
Counterpart recurrent_counterpart_of(std::string_view operation);

}  // namespace opacus_memprof::virtual_values
