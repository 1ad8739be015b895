// SPDX-License-Identifier: Apache-2.0
// A library of the name under which torch loads what calls cuSOLVER: it asks for a workspace.
#include "linalg.h"

#include <c10/cuda/CUDACachingAllocator.h>

namespace opacus_memprof::testing {

c10::DataPtr workspace_of_linalg(std::size_t bytes) {
  c10::DataPtr workspace = c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
  TORCH_CHECK(workspace.get() != nullptr);  // the call is not the last one, and returns to here
  return workspace;
}

}  // namespace opacus_memprof::testing
