// SPDX-License-Identifier: Apache-2.0
// libcuda: modules that programs load themselves (Triton, NVRTC, AOTInductor), and their kernels.
#include <cuda.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "virtual_gpu/machine/kernels.h"
#include "virtual_gpu/machine/machine.h"
#include "virtual_gpu/machine/observer.h"

namespace virtual_gpu = opacus_memprof::virtual_gpu;

using virtual_gpu::machine;
using virtual_gpu::Parameters;

namespace {

// Modules stay known when they are unloaded: there are few, and handles are not given out again.
std::mutex mutex;
std::map<CUmodule, std::map<std::string, Parameters>>& modules() {
  static auto* const all = new std::map<CUmodule, std::map<std::string, Parameters>>;
  return *all;
}
std::map<CUfunction, Parameters>& functions() {
  static auto* const all = new std::map<CUfunction, Parameters>;
  return *all;
}

CUresult load(CUmodule* module, const void* image) {
  virtual_gpu::make_handle(module);
  auto parameters = virtual_gpu::parameters_in(image);
  const std::lock_guard lock(mutex);
  modules()[*module] = std::move(parameters);
  return CUDA_SUCCESS;
}

// What the kernel is given: one address for each parameter, or one buffer (`extra`).
std::vector<std::uintptr_t> addresses_given(CUfunction function, void** arguments, void** extra) {
  Parameters parameters;
  {
    const std::lock_guard lock(mutex);
    const auto found = functions().find(function);
    if (found != functions().end()) parameters = found->second;
  }
  const char* buffer = nullptr;
  for (; extra != nullptr && *extra != CU_LAUNCH_PARAM_END; extra += 2) {
    if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER) buffer = static_cast<const char*>(extra[1]);
  }
  std::vector<std::uintptr_t> found;
  for (std::size_t index = 0; index < parameters.size(); ++index) {
    if (arguments == nullptr && buffer == nullptr) break;
    virtual_gpu::note_addresses(
        arguments != nullptr ? arguments[index] : buffer + parameters[index].offset,
        parameters[index].size, found);
  }
  return found;
}

CUresult launch(CUfunction function, CUstream stream, void** arguments, void** extra) {
  machine().memory.launch_kernel(virtual_gpu::current_device());
  virtual_gpu::Streams::Work work;
  if (const virtual_gpu::Outside outside; outside) {
    work = [outside, given = addresses_given(function, arguments, extra)] {
      for (const std::uintptr_t address : given) outside.kernel_has(address);
    };
  }
  machine().streams.launch(reinterpret_cast<virtual_gpu::Handle>(stream), std::move(work));
  return cuInit(0);
}

}  // namespace

extern "C" {

CUresult CUDAAPI cuModuleLoadData(CUmodule* module, const void* image) {
  return load(module, image);
}

CUresult CUDAAPI cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned /*count*/,
                                    CUjit_option* /*options*/, void** /*values*/) {
  return load(module, image);
}

CUresult CUDAAPI cuModuleLoad(CUmodule* module, const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string image{std::istreambuf_iterator<char>(file), {}};
  return file ? load(module, image.c_str()) : CUDA_ERROR_FILE_NOT_FOUND;
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  virtual_gpu::make_handle(function);
  const std::lock_guard lock(mutex);
  functions()[*function] = modules()[module][name];
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLaunchKernel(CUfunction function, unsigned /*grid_x*/, unsigned /*grid_y*/,
                                unsigned /*grid_z*/, unsigned /*block_x*/, unsigned /*block_y*/,
                                unsigned /*block_z*/, unsigned /*shared_memory*/, CUstream stream,
                                void** arguments, void** extra) {
  return launch(function, stream, arguments, extra);
}

CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig* configuration, CUfunction function,
                                  void** arguments, void** extra) {
  return launch(function, configuration->hStream, arguments, extra);
}
}
