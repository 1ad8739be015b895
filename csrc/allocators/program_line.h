// SPDX-License-Identifier: Apache-2.0
// The line of the user's own code that runs on the calling thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace opacus_memprof {

// Returns the op that stands for the innermost lines of the user's own code, at most three; 0 if
// none of the thread's frames is the user's. Makes no Python objects, and does not need the GIL.
[[gnu::cold]] std::uint16_t program_line() noexcept;

// Sets what is not the user's own code, as beginnings of paths, and the folders that are left out
// of paths.
void set_program(std::vector<std::string> libraries, std::vector<std::string> folders);

}  // namespace opacus_memprof
