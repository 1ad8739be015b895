// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "virtual_gpu/machine/address_space.h"

namespace opacus_memprof::virtual_gpu {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20U;
constexpr std::size_t kGiB = std::size_t{1} << 30U;

// A segment of a training on an H200, in MiB: size, and address after that of the first of 2 MiB.
struct Segment {
  std::size_t size;
  std::ptrdiff_t address;
};

// Before which segments the driver did what.
struct Training {
  std::size_t cudnn;  // 0: never
  std::size_t first_kernel;
  std::size_t cublas;
  std::vector<Segment> segments;
};

const Training kGpt = {
    0, 10, 11, {{32, -702}, {2, 0},     {20, 74},   {2, 94},    {20, -734}, {2, -714},
                {20, -766}, {20, -798}, {2, -778},  {32, -830}, {20, -414}, {32, -330},
                {20, -298}, {16, -278}, {20, -262}, {20, -242}, {16, -222}, {16, -206},
                {12, -190}, {20, -178}, {16, -158}, {16, -142}, {2, -994},  {12, -126},
                {20, -114}, {16, -94},  {16, -78},  {12, -62},  {20, -50},  {16, -30}}};
const Training kVisionTransformer = {
    11, 11, 12, {{2, 0},     {2, 74},    {20, 76},    {2, 96},    {2, -1022}, {2, -1020},
                 {2, -1018}, {2, -1016}, {20, -1014}, {2, -994},  {2, -992},  {20, -414},
                 {32, -330}, {20, -298}, {14, -1040}, {20, -278}, {20, -258}, {14, -238},
                 {14, -224}, {20, -210}, {20, -190},  {14, -170}, {20, -156}, {20, -136},
                 {14, -116}, {14, -102}, {20, -88},   {20, -68},  {14, -48},  {20, -34}}};

class Measured : public ::testing::TestWithParam<Training> {};

TEST_P(Measured, SegmentsLieInTheOrderThatTheyHaveOnAnH200) {
  const Training& training = GetParam();
  AddressSpace space(4 * kGiB);
  std::vector<const char*> taken;
  const char* origin = nullptr;
  for (const auto& segment : training.segments) {
    if (training.cudnn != 0 && taken.size() == training.cudnn) {
      space.create_cudnn_handle();
    }
    if (taken.size() == training.first_kernel) {
      space.launch_kernel();
    }
    if (taken.size() == training.cublas) {
      space.create_cublas_handle();
    }
    taken.push_back(static_cast<const char*>(space.take(segment.size * kMiB)));
    ASSERT_NE(taken.back(), nullptr);
    origin = segment.address == 0 ? taken.back() : origin;
  }
  for (std::size_t i = 0; i < taken.size(); ++i) {
    const auto address = training.segments[i].address;
    for (std::size_t j = 0; j < i; ++j) {
      EXPECT_EQ(taken[i] < taken[j], address < training.segments[j].address) << i << " " << j;
    }
    // In the context's own region the distances are the same, too.
    if (address >= -414) {
      EXPECT_EQ(taken[i] - origin, address * static_cast<std::ptrdiff_t>(kMiB)) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AddressSpace, Measured, ::testing::Values(kGpt, kVisionTransformer));

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
}  // namespace opacus_memprof::virtual_gpu
