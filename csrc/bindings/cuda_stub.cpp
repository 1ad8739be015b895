// SPDX-License-Identifier: Apache-2.0
// The CUDA functions of a build without CUDA: they say so.
#include <stdexcept>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace opacus_memprof {

namespace {

[[noreturn]] void no_cuda() {
  throw std::runtime_error(
      "opacus-memprof was built without CUDA; install a CUDA build of torch and build again "
      "(`opacus-memprof doctor` says what was found)");
}

}  // namespace

void bind_cuda(py::module_& module) {
  module.attr("HAS_CUDA") = false;
  for (const char* name : {"cuda_install", "cuda_allocator"}) module.def(name, &no_cuda);
  module.def(
      "cuda_refresh", [](int) { no_cuda(); }, py::arg("device"));
  module.def("cuda_uninstall", [] {});
  module.def("cuda_installed", [] { return false; });
  module.def("cuda_current_name", [] { return ""; });
}

}  // namespace opacus_memprof
