// SPDX-License-Identifier: Apache-2.0
// How often the program met values that were not computed, by operator and by the line of the
// program.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "virtual_values/ranges.h"

namespace opacus_memprof::virtual_values {

// By operator and, as "file:line", where the program called it; the line is empty where there is
// none, as on threads of autograd. More lines follow: the frames of Python, the innermost first,
// each with the columns of what it evaluates and the name of its function.
using Uses = std::map<std::pair<std::string, std::string>, std::uint64_t>;

// The host has read what is not known: what was not computed, or what other ranks would give.
void count_unknown_read(const std::string& operation, State state = State::assumed);
// A shape, or a choice of indices, was taken by the bound for values that were not computed.
void count_assumed_shape(const std::string& operation);
// The CPU could not carry it out; without lines.
void count_failure(const std::string& operation);

// An operator that read what other ranks would give has kOfRanks before its name.
inline constexpr const char* kOfRanks = "ranks: ";
Uses unknown_reads();
Uses assumed_shapes();
std::map<std::string, std::uint64_t> failures();

// Folders whose files are not the program's: frames in them are passed over. Set before the first
// count.
void set_libraries(std::vector<std::string> folders);

}  // namespace opacus_memprof::virtual_values
