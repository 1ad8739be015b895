// SPDX-License-Identifier: Apache-2.0
// Notes writes to device memory outside of operators: kernels of extensions, copies by CUDA's own
// functions, AOTInductor. The virtual GPU's libraries report each.
#pragma once

#include "virtual_values/ranges.h"

namespace opacus_memprof::virtual_values {

// Starts to note such writes. `in_operator` returns whether this thread runs an operator.
void observe_outside(bool (*in_operator)());

// While true, launches of this thread are not noted here, because the caller notes them.
void set_noted(bool noted);

// Notes a block of torch's allocator.
void note_block(Span span);

}  // namespace opacus_memprof::virtual_values
