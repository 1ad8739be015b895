// SPDX-License-Identifier: Apache-2.0
// The one machine that the libraries of this folder share: its devices, their memory and streams.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "virtual_gpu/machine/device.h"
#include "virtual_gpu/machine/memory.h"
#include "virtual_gpu/machine/streams.h"

namespace opacus_memprof::virtual_gpu {

struct Machine {
  std::vector<DeviceProperties>
      devices;  // none until it is started: a program that loads this sees no GPU
  Memory memory;
  Streams streams;
  int driver_version = 0;  // as cudaDriverGetVersion has it
};

// Never destroyed: threads of the program may outlive the end of main.
Machine& machine();

// The devices that the program sees: as many as CUDA_VISIBLE_DEVICES names, at most all. It may
// name any number or UUID, since a script names the devices of the machine that it was written for.
int visible_devices();
// The devices that NVML sees, from which nothing hides them.
int present_devices();
// The number that NVML has for a device of the program.
int number_of(int device);
// The program's device of this number; 0 if the program does not see it.
int device_of(int number);
// The UUID by which CUDA_VISIBLE_DEVICES names a device of NVML, or else its own: "GPU-...".
std::string uuid_of(int number);

// Whether the driver works in this process, which uses it from now on: it has devices and, as a
// driver's state does not outlive a fork, no parent had used it before the fork.
bool usable();
// Set while this thread asks as NVML does, which neither uses the driver nor needs it.
bool& asks_without_driver();
// Whether a parent had used the driver before the fork: then every call fails in this process.
bool lost_by_fork();

// The calling thread's current device.
int& current_device();

// A new handle for an object of which nothing needs to be known.
template <class T>
void make_handle(T* handle) {
  *handle = reinterpret_cast<T>(machine().streams.create_handle());
}

// Copies as the device would, where `size` is at most kSmall; a larger copy to the host reads as
// zero, and of a larger one to the device nothing is kept. Copies within the host are always made.
void copy(void* to, const void* from, std::size_t size);
// Rows of `width` bytes, whose beginnings are a pitch apart.
void copy_rows(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
               std::size_t width, std::size_t height);
void fill(void* to, int value, std::size_t size);
// `count` times the `width` bytes at `value`; more than kSmall on a device is not kept.
void fill_pattern(void* to, const void* value, std::size_t width, std::size_t count);

}  // namespace opacus_memprof::virtual_gpu
