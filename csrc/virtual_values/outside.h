// SPDX-License-Identifier: Apache-2.0
// What writes to device memory outside of operators: an extension's own kernels, copies that a
// program asks CUDA for, AOTInductor. The virtual GPU's libraries tell of each.
#pragma once

#include "virtual_values/ranges.h"

namespace opacus_memprof::virtual_values {

// Starts to listen. `in_operator` says whether an operator runs on this thread.
void observe_outside(bool (*in_operator)());

// While true, what this thread launches is somebody else's to note.
void set_noted(bool noted);

// Notes a block of torch's allocator.
void note_block(Span span);

}  // namespace opacus_memprof::virtual_values
