// SPDX-License-Identifier: Apache-2.0
// What stands in on the CPU for normalizations: over a batch, also in the parts that
// nn.SyncBatchNorm calls, over a layer, and by the root mean square.
#pragma once

#include <string_view>

#include "virtual_values/counterparts.h"

namespace opacus_memprof::virtual_values {

// nullptr for other operators.
Counterpart normalization_counterpart_of(std::string_view operation);

}  // namespace opacus_memprof::virtual_values
