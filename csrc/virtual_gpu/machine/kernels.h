// SPDX-License-Identifier: Apache-2.0
// Where the parameters of a kernel are, so that the device memory that it is given can be found.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace opacus_memprof::virtual_gpu {

struct Parameter {
  std::size_t offset = 0;  // in a buffer of all
  std::size_t size = 0;
};

using Parameters = std::vector<Parameter>;

// The parameters of the kernels in a cubin or in PTX, by name; empty for any other image. Throws
// nothing but std::bad_alloc.
std::map<std::string, Parameters> parameters_in(const void* image);

// How many bytes of each parameter may lead to memory that the kernel writes, from its mangled C++
// name: 0 for numbers and pointers to what is constant, kUnknownSize for structures. Nothing where
// the name tells nothing.
inline constexpr std::size_t kUnknownSize = 4096;  // the most that parameters can have
std::optional<std::vector<std::size_t>> writable_parameters(const char* mangled);

}  // namespace opacus_memprof::virtual_gpu
