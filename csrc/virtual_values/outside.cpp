// SPDX-License-Identifier: Apache-2.0
#include "virtual_values/outside.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

#include "virtual_gpu/machine/observer.h"
#include "virtual_values/counts.h"
#include "virtual_values/tensors.h"

namespace opacus_memprof::virtual_values {
namespace {

bool (*runs_operator)() = nullptr;
thread_local bool is_noted = false;

std::mutex blocks_mutex;
// The end of each block that torch's allocator has handed out, by its beginning.
std::map<std::uintptr_t, std::uintptr_t>& blocks() {
  static auto* const all = new std::map<std::uintptr_t, std::uintptr_t>;
  return *all;
}

std::uintptr_t number(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }

// The bytes stay, since the kernel may only read them, but are not known any more.
void after_kernel(void* address, void* end) {
  Span span{number(address), number(end)};
  {
    const std::lock_guard lock(blocks_mutex);
    const auto after = blocks().upper_bound(span.begin);
    if (after != blocks().begin() && span.begin < std::prev(after)->second)
      span.end = std::prev(after)->second;
  }
  if (span.size() > small_bytes()) return ranges().set_not_computed(span);
  ranges().materialize(span);
  ranges().set(span, State::assumed);
}

int before_read(const void* from, std::size_t size) {
  const Span source{number(from), number(from) + size};
  return static_cast<int>(size <= small_bytes() ? ranges().materialize(source) : State::assumed);
}

void after_write(void* to, std::size_t size, int state) {
  const Span target{number(to), number(to) + size};
  if (size > small_bytes()) return ranges().set_not_computed(target);
  ranges().set(target, static_cast<State>(state));
}

void before_copy(void* to, int to_device, const void* from, int from_device, std::size_t size) {
  const int state = from_device != 0 ? before_read(from, size) : static_cast<int>(State::known);
  if (to_device != 0) return after_write(to, size, state);
  if (static_cast<State>(state) != State::known)
    count_unknown_read("cudaMemcpy", static_cast<State>(state));
}

void before_fill(void* to, const void* value, std::size_t width, std::size_t count) {
  Uniform uniform{State::known, {.bytes = {}, .size = static_cast<std::uint8_t>(width)}};
  for (std::size_t index = 0; index < width; ++index) {
    const auto at = (number(to) + index) % width;
    std::memcpy(&uniform.pattern.bytes[at], static_cast<const char*>(value) + index, 1);
  }
  ranges().set_uniform({number(to), number(to) + width * count}, uniform);
}

void share(void* address, std::size_t size) {
  ranges().set({number(address), number(address) + size}, State::known);
}

}  // namespace

void observe_outside(bool (*in_operator)()) {
  runs_operator = in_operator;
  const virtual_gpu::Observer observer{
      .in_operator = [] { return static_cast<int>(is_noted || runs_operator()); },
      .copy = &before_copy,
      .fill = &before_fill,
      .share = &share,
      .read = &before_read,
      .written = &after_write,
      .kernel = &after_kernel};
  auto* const observe = reinterpret_cast<void (*)(const virtual_gpu::Observer*)>(
      dlsym(RTLD_DEFAULT, "memprof_virtual_gpu_observe"));
  TORCH_CHECK(observe != nullptr, "there is no virtual GPU in this process");
  observe(&observer);
}

void set_noted(bool noted) { is_noted = noted; }

void note_block(Span span) {
  const std::lock_guard lock(blocks_mutex);
  blocks().erase(blocks().lower_bound(span.begin), blocks().lower_bound(span.end));
  blocks()[span.begin] = span.end;
}

}  // namespace opacus_memprof::virtual_values
