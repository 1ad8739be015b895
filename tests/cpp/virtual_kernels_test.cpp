// SPDX-License-Identifier: Apache-2.0
#include <elf.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "virtual_gpu/machine/kernels.h"

namespace opacus_memprof::virtual_gpu {
namespace {

std::vector<std::vector<std::size_t>> places(const Parameters& parameters) {
  std::vector<std::vector<std::size_t>> found;
  for (const Parameter& parameter : parameters) found.push_back({parameter.offset, parameter.size});
  return found;
}

// What the compiler writes for `void scale(float*, int, Pair, double)`, where a Pair has 24 bytes.
TEST(VirtualKernels, ParametersInPtxLieWhereTheirAlignmentPutsThem) {
  const auto found = parameters_in(R"(
//
.version 9.0
.visible .entry scale(
	.param .u64 .ptr .align 1 scale_param_0,
	.param .u32 scale_param_1,
	.param .align 8 .b8 scale_param_2[24],
	.param .f64 scale_param_3
)
{ ret; }
.entry nothing()
{ ret; }
)");
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(places(found.at("scale")),
            (std::vector<std::vector<std::size_t>>{{0, 8}, {8, 4}, {16, 24}, {40, 8}}));
  EXPECT_TRUE(found.at("nothing").empty());
}

// An ELF file with one section of attributes, as a cubin has it for each kernel.
std::string cubin(const std::string& attributes) {
  const std::string names = std::string("\0.nv.info.scale\0.names\0", 23);
  Elf64_Ehdr header{};
  std::memcpy(header.e_ident, ELFMAG, SELFMAG);
  header.e_ident[EI_CLASS] = ELFCLASS64;
  header.e_shoff = sizeof header;
  header.e_shnum = 2;
  header.e_shstrndx = 1;
  Elf64_Shdr sections[2]{};
  sections[0].sh_name = 1;
  sections[0].sh_offset = sizeof header + sizeof sections;
  sections[0].sh_size = attributes.size();
  sections[1].sh_name = 16;
  sections[1].sh_offset = sections[0].sh_offset + attributes.size();
  sections[1].sh_size = names.size();
  std::string file(reinterpret_cast<const char*>(&header), sizeof header);
  file.append(reinterpret_cast<const char*>(sections), sizeof sections);
  return file + attributes + names;
}

// Taken from nvrtc 13.2 for two parameters, the last one first: 4 bytes at 8, and 8 bytes at 0.
TEST(VirtualKernels, ParametersInACubinAreItsAttributes) {
  const std::string attributes(
      "\x04\x37\x04\x00\x86\x00\x00\x00"
      "\x04\x17\x0c\x00\x00\x00\x00\x00\x01\x00\x08\x00\x00\xf0\x11\x00"
      "\x04\x17\x0c\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xf0\x21\x00"
      "\x03\x1b\xff\x00",
      44);
  const auto found = parameters_in(cubin(attributes).data());
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(places(found.at("scale")), (std::vector<std::vector<std::size_t>>{{0, 8}, {8, 4}}));
}

TEST(VirtualKernels, OtherImagesTellNothing) {
  EXPECT_TRUE(parameters_in("\x50\xed\x55\xba and a fatbin").empty());
}

using Bytes = std::vector<std::size_t>;

TEST(VirtualKernels, NamesTellWhatAKernelMayWrite) {
  // void scale<float>(float*, float const*, int)
  EXPECT_EQ(writable_parameters("_Z5scaleIfEvPT_PKS0_i"), (Bytes{8, 0, 0}));
  // (anonymous namespace)::fill(State<2, int>, unsigned long, bool)
  EXPECT_EQ(writable_parameters("_ZN12_GLOBAL__N_14fillE5StateILi2EiEmb"),
            (Bytes{kUnknownSize, 0, 0}));
  // at::native::vectorized_elementwise_kernel<...>(int, FillFunctor<long>, std::array<char*, 1ul>)
  EXPECT_EQ(
      writable_parameters("_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIlE"
                          "ESt5arrayIPcLm1EELb0EEEviT0_T1_"),
      (Bytes{0, 0, 8}));
  EXPECT_EQ(writable_parameters("_Z4nonev"), Bytes{});
  EXPECT_FALSE(writable_parameters("scale")) << "extern \"C\"";
}

}  // namespace
}  // namespace opacus_memprof::virtual_gpu
