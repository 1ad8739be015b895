// SPDX-License-Identifier: Apache-2.0
// What opacus_memprof/virtual_gpu calls: starts the machine and asks what was answered by a
// default.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>

#include "virtual_gpu/defaults/defaults.h"
#include "virtual_gpu/machine/limits.h"
#include "virtual_gpu/machine/machine.h"
#include "virtual_gpu/machine/observer.h"

namespace virtual_gpu = opacus_memprof::virtual_gpu;

extern "C" {

// Devices of one kind, `count` of them. Until this is called the program sees no GPU at all.
void memprof_virtual_gpu_start(const virtual_gpu::DeviceProperties* device, int count,
                               int driver_version) {
  auto& machine = virtual_gpu::machine();
  if (!machine.devices.empty()) {
    return;
  }
  machine.driver_version = driver_version;
  for (int index = 0; index < count; ++index) {
    machine.memory.add_device(device->total_memory, device->context_memory);
    machine.devices.push_back(*device);
  }
}

// Sets whether this thread's calls leave the driver as it is, as NVML's do.
void memprof_virtual_gpu_ask_without_driver(int asks) {
  virtual_gpu::asks_without_driver() = asks != 0;
}

// The devices that NVML sees.
int memprof_virtual_gpu_present() { return virtual_gpu::present_devices(); }
int memprof_virtual_gpu_device(int number) { return virtual_gpu::device_of(number); }
void memprof_virtual_gpu_uuid(int number, char* text, unsigned size) {
  std::snprintf(text, size, "%s", virtual_gpu::uuid_of(number).c_str());
}

// The name and number of calls of the symbol at `index`, from 0; nullptr past the last one.
const char* memprof_virtual_gpu_default(std::size_t index, std::uint64_t* calls) {
  const auto& answer = virtual_gpu::default_answers[index];
  *calls = answer.calls.load(std::memory_order_relaxed);
  return answer.name;
}

void memprof_virtual_gpu_observe(const virtual_gpu::Observer* observer) {
  virtual_gpu::observe(*observer);
}

// Whether any stream is being captured.
int memprof_virtual_gpu_capturing() {
  return static_cast<int>(virtual_gpu::machine().streams.capturing());
}

// Each replay of the graph into which the stream is captured calls the function, until what was
// captured is freed and `destroy` is called. Does nothing and answers 0 where the stream is not
// captured.
int memprof_virtual_gpu_add_work(void* stream, void (*function)(void*), void* data,
                                 void (*destroy)(void*)) {
  auto& streams = virtual_gpu::machine().streams;
  const auto handle = reinterpret_cast<virtual_gpu::Handle>(stream);
  if (!streams.capture(handle)) {
    return 0;
  }
  const std::shared_ptr<void> kept(data, destroy);
  return static_cast<int>(streams.add_work(handle, [function, kept] { function(kept.get()); }));
}

std::size_t memprof_virtual_gpu_small_bytes() { return virtual_gpu::kSmall; }
}
