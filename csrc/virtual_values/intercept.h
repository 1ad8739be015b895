// SPDX-License-Identifier: Apache-2.0
// Operators on the virtual GPU's tensors pass here, between autograd and the CUDA kernels.
//
// The place is the dispatch key Fake, which torch itself does not use. Threads of autograd inherit
// it with the thread-local state of the one that calls backward().
#pragma once

namespace opacus_memprof::virtual_values {

// Registers what stands at the key; once.
void install();

// From now on operators that this thread calls are seen.
void enable_thread();

}  // namespace opacus_memprof::virtual_values
