// SPDX-License-Identifier: Apache-2.0
#include "virtual_gpu/defaults/defaults.h"

#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>
#include <string>

#include "virtual_gpu/machine/machine.h"

namespace opacus_memprof::virtual_gpu {
namespace {

thread_local int asking = 0;

enum Index : std::size_t {
#define DEFAULT(name, parameters, answers) index_##name,
#define NO_EFFECT(name, parameters, answers)
#include "defaults.inc"
#undef DEFAULT
};

void give_zero(std::intptr_t to, std::size_t size) {
  if (to != 0) {
    std::memset(reinterpret_cast<void*>(to), 0, size);
  }
}

void give_handle(std::intptr_t to) {
  if (to != 0) {
    make_handle(reinterpret_cast<void**>(to));
  }
}

}  // namespace

DefaultAnswer default_answers[] = {
#define DEFAULT(name, parameters, answers) {#name, 0},
#include "defaults.inc"
#undef DEFAULT
    {nullptr, 0}};

Asking::Asking() { ++asking; }
Asking::~Asking() { --asking; }

void unknown_symbol(const char* name) {
  if (asking > 0) {
    return;
  }
  static auto* const seen = new std::set<std::string>;
  static auto* const mutex = new std::mutex;
  const std::lock_guard lock(*mutex);
  if (seen->insert(name).second) {
    std::fprintf(stderr, "opacus-memprof: the virtual GPU has no %s, which the program asks for\n",
                 name);
  }
}

}  // namespace opacus_memprof::virtual_gpu

// Of whatever type they are declared: an int, a pointer and an enum all come back in one register,
// and each parameter that is not a floating-point number takes one.
#define DEFAULT(name, parameters, answers)                                       \
  extern "C" long name parameters {                                              \
    using namespace opacus_memprof::virtual_gpu;                                 \
    default_answers[index_##name].calls.fetch_add(1, std::memory_order_relaxed); \
    answers return 0;                                                            \
  }
#undef NO_EFFECT
#define NO_EFFECT(name, parameters, answers)     \
  extern "C" long name parameters {              \
    using namespace opacus_memprof::virtual_gpu; \
    answers return 0;                            \
  }
#include "defaults.inc"
#undef DEFAULT
#undef NO_EFFECT
