// SPDX-License-Identifier: Apache-2.0
// Replaces CUDA's allocator in a build without CUDA.
#include <stdexcept>

#include "allocators/profiled_allocator.h"

namespace opacus_memprof {

void throw_no_cuda() {
  throw std::runtime_error(
      "opacus-memprof was built without CUDA; install a CUDA build of torch and build again "
      "(`opacus-memprof doctor` says what was found)");
}

namespace {

class NoCudaAllocator final : public ProfiledAllocator {
 public:
  void install() override { throw_no_cuda(); }
  void uninstall() override {}
  [[nodiscard]] bool installed() const override { return false; }
  bool adopt(c10::DataPtr& /*data*/, std::size_t /*bytes*/) override { return false; }
  void note_peak(PeakId /*peak*/) noexcept override {}
};

}  // namespace

ProfiledAllocator& cuda_allocator() {
  static auto* const instance = new NoCudaAllocator;
  return *instance;
}

std::string cuda_current_name() { return ""; }

std::int64_t cuda_refresh(int /*device*/) { throw_no_cuda(); }

}  // namespace opacus_memprof
