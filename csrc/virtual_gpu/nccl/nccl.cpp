// SPDX-License-Identifier: Apache-2.0
// libnccl: communicators of which this process plays one rank. Nothing is sent
// (nccl_collectives.cpp).
#include <nccl.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "virtual_gpu/machine/machine.h"
#include "virtual_gpu/nccl/communicators.h"
#include "virtual_gpu/nccl/reductions.h"

namespace virtual_gpu = opacus_memprof::virtual_gpu;

namespace {

using virtual_gpu::communicators;

virtual_gpu::Handle handle(ncclComm_t communicator) {
  return reinterpret_cast<virtual_gpu::Handle>(communicator);
}

ncclResult_t create(ncclComm_t* communicator, int ranks, int rank,
                    int device = virtual_gpu::current_device(), std::uint64_t clique = 0) {
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    return ncclInvalidArgument;
  }
  const auto created = communicators().create(ranks, rank, device, clique);
  *communicator = reinterpret_cast<ncclComm_t>(created);
  return created == 0 ? ncclUnhandledCudaError : ncclSuccess;
}

// Buffers that were registered as windows.
struct Windows {
  std::mutex mutex;
  std::unordered_map<ncclWindow_t, void*> buffers;
};

Windows& windows() {
  static auto* const only = new Windows;
  return *only;
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    default:
      return "an error of the virtual GPU";
  }
}

const char* ncclGetLastError(ncclComm_t /*communicator*/) { return ""; }

// --- communicators ---

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id, 1, sizeof *id);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* communicator, int ranks, ncclUniqueId /*id*/, int rank) {
  return create(communicator, ranks, rank);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* communicator, int ranks, ncclUniqueId /*id*/,
                                    int rank, ncclConfig_t* /*configuration*/) {
  return create(communicator, ranks, rank);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* communicator, int ranks, int rank, int /*ids*/,
                                      ncclUniqueId* /*id*/, ncclConfig_t* /*configuration*/) {
  return create(communicator, ranks, rank);
}

ncclResult_t ncclCommInitAll(ncclComm_t* all, int devices, const int* device_list) {
  const virtual_gpu::Handle clique = virtual_gpu::machine().streams.create_handle();
  for (int rank = 0; rank < devices; ++rank) {
    const int device = device_list == nullptr ? rank : device_list[rank];
    if (const auto result = create(&all[rank], devices, rank, device, clique);
        result != ncclSuccess) {
      return result;
    }
  }
  return ncclSuccess;
}

// The key orders the ranks of a color; torch gives the rank in the new group.
ncclResult_t ncclCommSplit(ncclComm_t communicator, int color, int key, ncclComm_t* split,
                           ncclConfig_t* /*configuration*/) {
  *split = nullptr;
  const auto parent = communicators().find(handle(communicator));
  if (!parent) {
    return ncclInvalidArgument;
  }
  if (color == NCCL_SPLIT_NOCOLOR) {
    return ncclSuccess;
  }
  const int said = virtual_gpu::next_split_size();
  const int ranks = said > 0 ? said : communicators().split_size(color).value_or(parent->ranks);
  return create(split, ranks, std::clamp(key, 0, ranks - 1), parent->device);
}

ncclResult_t ncclCommShrink(ncclComm_t communicator, int* excluded, int count, ncclComm_t* shrunk,
                            ncclConfig_t* /*configuration*/, int /*flags*/) {
  const auto parent = communicators().find(handle(communicator));
  if (!parent) {
    return ncclInvalidArgument;
  }
  const auto before =
      std::count_if(excluded, excluded + count, [&](int rank) { return rank < parent->rank; });
  return create(shrunk, parent->ranks - count, parent->rank - static_cast<int>(before),
                parent->device);
}

// Ranks of the old communicator keep their number, and pass -1.
ncclResult_t ncclCommGrow(ncclComm_t communicator, int ranks, const ncclUniqueId* /*id*/, int rank,
                          ncclComm_t* grown, ncclConfig_t* /*configuration*/) {
  const auto parent = communicators().find(handle(communicator));
  return create(grown, ranks, rank < 0 && parent ? parent->rank : rank);
}

ncclResult_t ncclCommGetUniqueId(ncclComm_t /*communicator*/, ncclUniqueId* id) {
  return ncclGetUniqueId(id);
}

// Called for communicators that were aborted or finalized, too, and by any thread.
ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  communicators().destroy(handle(communicator));
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t communicator) { return ncclCommDestroy(communicator); }

ncclResult_t ncclCommFinalize(ncclComm_t /*communicator*/) { return ncclSuccess; }

ncclResult_t ncclCommGetAsyncError(ncclComm_t /*communicator*/, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t communicator, int* count) {
  const auto found = communicators().find(handle(communicator));
  *count = found ? found->ranks : 0;
  return found ? ncclSuccess : ncclInvalidArgument;
}

ncclResult_t ncclCommUserRank(ncclComm_t communicator, int* rank) {
  const auto found = communicators().find(handle(communicator));
  *rank = found ? found->rank : 0;
  return found ? ncclSuccess : ncclInvalidArgument;
}

ncclResult_t ncclCommCuDevice(ncclComm_t communicator, int* device) {
  const auto found = communicators().find(handle(communicator));
  *device = found ? found->device : 0;
  return found ? ncclSuccess : ncclInvalidArgument;
}

// --- memory ---

ncclResult_t ncclMemAlloc(void** address, std::size_t size) {
  *address = virtual_gpu::machine().memory.allocate(virtual_gpu::current_device(), size);
  return *address == nullptr ? ncclUnhandledCudaError : ncclSuccess;
}

ncclResult_t ncclMemFree(void* address) {
  return address == nullptr || virtual_gpu::machine().memory.release(address) ? ncclSuccess
                                                                              : ncclInvalidArgument;
}

ncclResult_t ncclCommRegister(ncclComm_t /*communicator*/, void* /*buffer*/, std::size_t /*size*/,
                              void** registered) {
  virtual_gpu::make_handle(registered);
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(ncclComm_t /*communicator*/, void* /*registered*/) {
  return ncclSuccess;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t /*communicator*/, void* buffer, std::size_t /*size*/,
                                    ncclWindow_t* window, int /*flags*/) {
  virtual_gpu::make_handle(window);
  const std::lock_guard lock(windows().mutex);
  windows().buffers[*window] = buffer;
  return ncclSuccess;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t /*communicator*/, ncclWindow_t window) {
  const std::lock_guard lock(windows().mutex);
  windows().buffers.erase(window);
  return ncclSuccess;
}

ncclResult_t ncclWinGetUserPtr(ncclComm_t /*communicator*/, ncclWindow_t window, void** buffer) {
  const std::lock_guard lock(windows().mutex);
  const auto found = windows().buffers.find(window);
  *buffer = found == windows().buffers.end() ? nullptr : found->second;
  return ncclSuccess;
}

// --- reductions of one's own ---

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* operation, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence,
                                      ncclComm_t /*communicator*/) {
  *operation = virtual_gpu::create_scaled_sum(scalar, type, residence == ncclScalarDevice);
  return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t operation, ncclComm_t /*communicator*/) {
  return virtual_gpu::destroy_scaled_sum(operation) ? ncclSuccess : ncclInvalidArgument;
}

// --- what opacus_memprof/virtual_gpu says ---

void memprof_virtual_gpu_split_size(int color, int ranks) {
  communicators().set_split_size(color, ranks);
}

void memprof_virtual_gpu_next_split(int ranks) { virtual_gpu::next_split_size() = ranks; }
}
