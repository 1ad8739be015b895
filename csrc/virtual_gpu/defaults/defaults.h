// SPDX-License-Identifier: Apache-2.0
// Symbols that no file of this folder defines: each is answered with 0 (success), and counted by
// name.
//
// build.py writes defaults.inc, a list of their names: what the installed torch imports from CUDA's
// libraries, and what those export.
#pragma once

#include <atomic>
#include <cstdint>

namespace opacus_memprof::virtual_gpu {

struct DefaultAnswer {
  const char* name;
  std::atomic<std::uint64_t> calls;
};

// Ends with an entry whose name is nullptr.
extern DefaultAnswer default_answers[];

// Notes that something was asked for which is not here at all; prints one sentence for each name.
void unknown_symbol(const char* name);

// While one lives, its thread may ask for what is not here, and nothing is printed: libraries of
// CUDA's that are asked, and not run, look for a whole driver and do without.
class Asking {
 public:
  Asking();
  ~Asking();
  Asking(const Asking&) = delete;
  Asking& operator=(const Asking&) = delete;
};

}  // namespace opacus_memprof::virtual_gpu
