// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "virtual_gpu/address_space.h"

namespace virtual_gpu {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20U;
constexpr std::size_t kGiB = std::size_t{1} << 30U;

// The first 30 segments of a GPT's training on an H200, in MiB: size, and address after that of the
// second. The first kernel came before the eleventh, and cuBLAS after it.
struct Segment {
  std::size_t size;
  std::ptrdiff_t address;
};
constexpr std::size_t kFirstKernel = 10;
constexpr std::size_t kCublas = 11;
constexpr Segment kMeasured[] = {
    {32, -702}, {2, 0},     {20, 74},   {2, 94},    {20, -734}, {2, -714},  {20, -766}, {20, -798},
    {2, -778},  {32, -830}, {20, -414}, {32, -330}, {20, -298}, {16, -278}, {20, -262}, {20, -242},
    {16, -222}, {16, -206}, {12, -190}, {20, -178}, {16, -158}, {16, -142}, {2, -994},  {12, -126},
    {20, -114}, {16, -94},  {16, -78},  {12, -62},  {20, -50},  {16, -30}};

TEST(AddressSpace, SegmentsLieInTheOrderThatTheyHaveOnAnH200) {
  AddressSpace space(4 * kGiB);
  std::vector<const char*> taken;
  for (const auto& segment : kMeasured) {
    if (taken.size() == kFirstKernel) {
      space.launch_kernel();
    }
    if (taken.size() == kCublas) {
      space.create_cublas_handle();
    }
    taken.push_back(static_cast<const char*>(space.take(segment.size * kMiB)));
    ASSERT_NE(taken.back(), nullptr);
  }
  for (std::size_t i = 0; i < taken.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      EXPECT_EQ(taken[i] < taken[j], kMeasured[i].address < kMeasured[j].address) << i << " " << j;
    }
    // In the context's own region the distances are the same, too.
    if (kMeasured[i].address > -414) {
      EXPECT_EQ(taken[i] - taken[1], kMeasured[i].address * static_cast<std::ptrdiff_t>(kMiB)) << i;
    }
  }
}

TEST(AddressSpace, NeighboursThatAreGivenBackAreOneGap) {
  AddressSpace space(kGiB);
  char* const first = static_cast<char*>(space.take(10 * kMiB));
  char* const second = static_cast<char*>(space.take(8 * kMiB));
  ASSERT_EQ(second, first + 10 * kMiB);
  *second = 1;
  space.give_back(second, 8 * kMiB);
  space.give_back(first, 10 * kMiB);
  char* const both = static_cast<char*>(space.take(18 * kMiB));
  EXPECT_EQ(both, first);
  EXPECT_EQ(*second, 0);
}

TEST(AddressSpace, ARegionWithNothingInItMakesRoomForALargerOne) {
  AddressSpace space(256 * kMiB);
  void* const lower = space.take(128 * kMiB);
  void* const upper = space.take(128 * kMiB);
  ASSERT_NE(lower, nullptr);
  ASSERT_NE(upper, nullptr);
  EXPECT_EQ(space.take(256 * kMiB), nullptr);
  space.give_back(lower, 128 * kMiB);
  space.give_back(upper, 128 * kMiB);
  EXPECT_NE(space.take(256 * kMiB), nullptr);
}

}  // namespace
}  // namespace virtual_gpu
