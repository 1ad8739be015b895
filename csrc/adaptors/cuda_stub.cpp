// SPDX-License-Identifier: Apache-2.0
// Stands in for the CUDA adaptor in a build without CUDA.
#include "adaptors/adaptor.h"

namespace opacus_memprof {

Adaptor* cuda_adaptor() { return nullptr; }

}  // namespace opacus_memprof
