// SPDX-License-Identifier: Apache-2.0
// libnccl: communicators of which this process plays one rank. Nothing is sent.
#include <nccl.h>

#include <atomic>
#include <cstring>

#include "virtual_gpu/machine.h"

namespace {

struct Communicator {
  int ranks;
  int rank;
};

const Communicator& of(ncclComm_t communicator) {
  return *reinterpret_cast<const Communicator*>(communicator);
}

ncclResult_t create(ncclComm_t* communicator, int ranks, int rank) {
  *communicator = reinterpret_cast<ncclComm_t>(new Communicator{ranks, rank});
  return ncclSuccess;
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclSuccess ? "no error" : "an error of the virtual GPU";
}

const char* ncclGetLastError(ncclComm_t /*communicator*/) { return ""; }

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

ncclResult_t ncclCommSplit(ncclComm_t communicator, int /*color*/, int key,
                           ncclComm_t* split, ncclConfig_t* /*configuration*/) {
  return create(split, of(communicator).ranks, key);
}

ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  delete &of(communicator);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t communicator) { return ncclCommDestroy(communicator); }

ncclResult_t ncclCommGetAsyncError(ncclComm_t /*communicator*/, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t communicator, int* count) {
  *count = of(communicator).ranks;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(ncclComm_t communicator, int* rank) {
  *rank = of(communicator).rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(ncclComm_t /*communicator*/, int* device) {
  *device = virtual_gpu::current_device();
  return ncclSuccess;
}

ncclResult_t ncclCommRegister(ncclComm_t /*communicator*/, void* /*buffer*/, std::size_t /*size*/,
                              void** handle) {
  virtual_gpu::make_handle(handle);
  return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void** address, std::size_t size) {
  *address = virtual_gpu::machine().memory.allocate(virtual_gpu::current_device(), size);
  return *address == nullptr ? ncclUnhandledCudaError : ncclSuccess;
}

ncclResult_t ncclMemFree(void* address) {
  return virtual_gpu::machine().memory.release(address) ? ncclSuccess : ncclInvalidArgument;
}
}
