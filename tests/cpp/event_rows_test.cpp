// SPDX-License-Identifier: Apache-2.0
#include "core/event_rows.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "core/replay.h"
#include "event_file_builder.h"

namespace opacus_memprof {
namespace {

using testing::EventFileBuilder;
using enum EventKind;

std::vector<EventRow> rows_of(const std::string& path) {
  std::vector<EventRow> rows;
  for_event_rows(path, [&](std::span<const EventRow> piece) {
    rows.insert(rows.end(), piece.begin(), piece.end());
  });
  return rows;
}

std::uint8_t id(Category category) { return static_cast<std::uint8_t>(category); }

TEST(EventRows, TellWhatABlockTurnsOutToBe) {
  EventFileBuilder file;
  file.add({.kind = alloc,
            .address = 64,
            .size = 10,
            .category = Category::backward_temporaries,
            .phase = Phase::backward,
            .module = 7});
  file.add({.kind = retag,
            .address = 64,
            .category = Category::gradients,
            .module = 8,
            .op = id(Category::backward_temporaries)});
  file.add({.kind = free, .address = 64, .size = 10, .category = Category::gradients});
  const auto rows = rows_of(file.write());
  ASSERT_EQ(rows.size(), 3U);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i].event, i);
    EXPECT_EQ(rows[i].block, 0);
    EXPECT_EQ(rows[i].bytes, 10U);
    EXPECT_EQ(rows[i].address, 64U);
    EXPECT_EQ(rows[i].category, id(Category::gradients));
    EXPECT_EQ(rows[i].before, id(Category::gradients));
    EXPECT_EQ(rows[i].time_ns, static_cast<std::int64_t>(2 * (i + 1)));
  }
  EXPECT_EQ(rows[0].tag, id(Category::backward_temporaries));
  EXPECT_EQ(rows[0].module, 7U);
  EXPECT_EQ(rows[1].module, 8U);
  EXPECT_EQ(rows[1].op, 0U);
}

TEST(EventRows, AnAllocationOverALiveBlockFreesIt) {
  EventFileBuilder file;
  file.add({.kind = alloc, .address = 64, .size = 10});
  file.add({.kind = alloc, .address = 64, .size = 20});
  file.add({.kind = free, .address = 128, .size = 5});  // nothing lives there
  const auto rows = rows_of(file.write());
  ASSERT_EQ(rows.size(), 4U);
  EXPECT_EQ(rows[1].kind, static_cast<std::uint8_t>(free));
  EXPECT_EQ(rows[1].event, 1U);
  EXPECT_EQ(rows[1].bytes, 10U);
  EXPECT_EQ(rows[2].block, 1);
  EXPECT_EQ(rows[3].block, EventRow::kNoBlock);
}

TEST(EventRows, ComeInPiecesAndStopWhereTheTakerThrows) {
  EventFileBuilder file;
  for (std::uint64_t i = 0; i < 100'000; ++i) file.add({.kind = alloc, .address = i, .size = i});
  const std::string path = file.write();
  const auto rows = rows_of(path);
  ASSERT_EQ(rows.size(), 100'000U);
  EXPECT_EQ(rows.back().bytes, 99'999U);
  int pieces = 0;
  EXPECT_THROW(for_event_rows(path,
                              [&](std::span<const EventRow>) {
                                ++pieces;
                                throw std::logic_error("enough");
                              }),
               std::logic_error);
  EXPECT_EQ(pieces, 1);
  EXPECT_THROW(rows_of("/nowhere/events.bin"), std::runtime_error);
}

}  // namespace
}  // namespace opacus_memprof
