// SPDX-License-Identifier: Apache-2.0
// libcudart: kernels, which are known and never run, and the driver's entry points.
#include "virtual_gpu/machine/kernels.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <vector_types.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "virtual_gpu/driver/symbols.h"
#include "virtual_gpu/machine/limits.h"
#include "virtual_gpu/machine/machine.h"
#include "virtual_gpu/machine/observer.h"
#include "virtual_gpu/runtime/status.h"

namespace virtual_gpu = opacus_memprof::virtual_gpu;

using virtual_gpu::current_device;
using virtual_gpu::machine;

namespace {

// No kernel of torch is known here; this many registers a thread is what most of them take.
constexpr int kRegistersPerThread = 32;

struct Configuration {
  dim3 grid;
  dim3 block;
  std::size_t shared_memory;
  void* stream;
};

std::vector<Configuration>& configurations() {
  thread_local std::vector<Configuration> pushed;
  return pushed;
}

const virtual_gpu::DeviceProperties& device() {
  return machine().devices[static_cast<std::size_t>(current_device())];
}

// The names of all kernels, by the address of their stub on the host. torch has very many.
struct Names {
  std::mutex mutex;
  std::vector<std::pair<const void*, const char*>> registered;  // since one was last asked for
  std::unordered_map<const void*, const char*> found;
};

Names& names() {
  static auto* const all = new Names;
  return *all;
}

const char* name_of(const void* function) {
  const std::lock_guard lock(names().mutex);
  auto& [mutex, registered, found] = names();
  found.insert(registered.begin(), registered.end());
  registered.clear();
  const auto name = found.find(function);
  return name == found.end() ? nullptr : name->second;
}

// Arguments lie on the stack of the thread that launches.
std::uintptr_t end_of_stack() {
  pthread_attr_t attributes;
  void* begin = nullptr;
  std::size_t size = 0;
  if (pthread_getattr_np(pthread_self(), &attributes) != 0) return 0;
  pthread_attr_getstack(&attributes, &begin, &size);
  pthread_attr_destroy(&attributes);
  return reinterpret_cast<std::uintptr_t>(begin) + size;
}

std::vector<std::uintptr_t> addresses_given(const void* function, void** arguments) {
  std::vector<std::uintptr_t> found;
  const char* const name = name_of(function);
  const auto writable = name == nullptr ? std::nullopt : virtual_gpu::writable_parameters(name);
  if (!writable || arguments == nullptr) return found;
  for (std::size_t index = 0; index < writable->size(); ++index) {
    const auto begin = reinterpret_cast<std::uintptr_t>(arguments[index]);
    std::uintptr_t end = begin + (*writable)[index];
    if ((*writable)[index] == virtual_gpu::kUnknownSize) {
      if (const std::uintptr_t stack = end_of_stack(); begin < stack) end = std::min(end, stack);
      for (std::size_t other = 0; other < writable->size(); ++other) {
        const auto next = reinterpret_cast<std::uintptr_t>(arguments[other]);
        if (next > begin) end = std::min(end, next);
      }
    }
    virtual_gpu::note_addresses(arguments[index], end - begin, found);
  }
  return found;
}

cudaError_t launch(const void* function, void** arguments, cudaStream_t stream) {
  if (const cudaError_t error = virtual_gpu::ready()) {
    return error;
  }
  machine().memory.launch_kernel(current_device());
  virtual_gpu::Streams::Work work;
  if (const virtual_gpu::Outside outside; outside) {
    work = [outside, given = addresses_given(function, arguments)] {
      for (const std::uintptr_t address : given) outside.kernel_has(address);
    };
  }
  machine().streams.launch(reinterpret_cast<virtual_gpu::Handle>(stream), std::move(work));
  return cudaSuccess;
}

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void* /*binary*/) {
  static void* handle[8];
  return handle;
}

void __cudaRegisterFunction(void** /*binary*/, const char* function, char* /*function_on_device*/,
                            const char* name, int /*threads*/, uint3* /*thread*/, uint3* /*block*/,
                            dim3* /*block_size*/, dim3* /*grid_size*/, int* /*warp_size*/) {
  const std::lock_guard lock(names().mutex);
  names().registered.emplace_back(function, name);
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared_memory,
                                     void* stream) {
  configurations().push_back({grid, block, shared_memory, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared_memory,
                                       void* stream) {
  auto& pushed = configurations();
  if (pushed.empty()) {
    return virtual_gpu::fail(cudaErrorInvalidConfiguration);
  }
  *grid = pushed.back().grid;
  *block = pushed.back().block;
  *shared_memory = pushed.back().shared_memory;
  *static_cast<void**>(stream) = pushed.back().stream;
  pushed.pop_back();
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 /*grid*/, dim3 /*block*/, void** arguments,
                               std::size_t /*shared_memory*/, cudaStream_t stream) {
  return launch(reinterpret_cast<const void*>(kernel), arguments, stream);
}

cudaError_t cudaLaunchKernel(const void* function, dim3 /*grid*/, dim3 /*block*/, void** arguments,
                             std::size_t /*shared_memory*/, cudaStream_t stream) {
  return launch(function, arguments, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* function,
                                void** arguments) {
  return launch(function, arguments, configuration->stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 /*grid*/, dim3 /*block*/,
                                        void** arguments, std::size_t /*shared_memory*/,
                                        cudaStream_t stream) {
  return launch(function, arguments, stream);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* /*function*/) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->ptxVersion = device().kernel_architecture;
  attributes->binaryVersion = device().kernel_architecture;
  attributes->maxThreadsPerBlock = virtual_gpu::kThreadsPerBlock;
  attributes->numRegs = kRegistersPerThread;
  attributes->maxDynamicSharedSizeBytes = virtual_gpu::kSharedMemoryPerBlock;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks,
                                                                   const void* /*function*/,
                                                                   int threads,
                                                                   std::size_t shared_memory,
                                                                   unsigned /*flags*/) {
  const auto& on = device();
  *blocks =
      std::min(on.blocks_per_multiprocessor, on.threads_per_multiprocessor / std::max(threads, 1));
  if (shared_memory > 0) {
    *blocks = std::min(
        *blocks, static_cast<int>(static_cast<std::size_t>(on.shared_memory_per_multiprocessor) /
                                  shared_memory));
  }
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function,
                                                          int threads, std::size_t shared_memory) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads,
                                                                shared_memory, 0);
}

// Variables of the device: nobody reads what is written there, so that they may share one place.
cudaError_t cudaGetSymbolAddress(void** address, const void* /*symbol*/) {
  static char variables[1 << 16];
  *address = variables;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function,
                                             unsigned /*version*/, unsigned long long /*flags*/,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = virtual_gpu::driver_symbol(symbol);
  if (result != nullptr) {
    *result =
        *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  }
  return *function != nullptr ? cudaSuccess : virtual_gpu::fail(cudaErrorSymbolNotFound);
}

// No longer declared by CUDA 13, whose runtime still has it.
cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(symbol, function, CUDART_VERSION, flags, result);
}
}
