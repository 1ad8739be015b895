// SPDX-License-Identifier: Apache-2.0
#include "virtual_gpu/defaults.h"

#include <cstdio>
#include <mutex>
#include <set>
#include <string>

namespace virtual_gpu {
namespace {

enum Index : std::size_t {
#define DEFAULT(name) index_##name,
#include "defaults.inc"
#undef DEFAULT
};

}  // namespace

DefaultAnswer default_answers[] = {
#define DEFAULT(name) {#name, 0},
#include "defaults.inc"
#undef DEFAULT
    {nullptr, 0}};

void unknown_symbol(const char* name) {
  static auto* const seen = new std::set<std::string>;
  static auto* const mutex = new std::mutex;
  const std::lock_guard lock(*mutex);
  if (seen->insert(name).second) {
    std::fprintf(stderr, "opacus-memprof: the virtual GPU has no %s, which the program asks for\n", name);
  }
}

}  // namespace virtual_gpu

// Of whatever type they are declared: an int, a pointer and an enum all come back in one register.
#define DEFAULT(name)                                                                    \
  extern "C" long name() {                                                               \
    using namespace virtual_gpu;                                                         \
    default_answers[index_##name].calls.fetch_add(1, std::memory_order_relaxed);         \
    return 0;                                                                            \
  }
#include "defaults.inc"
#undef DEFAULT
