// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "virtual_gpu/machine/streams.h"

namespace opacus_memprof::virtual_gpu {
namespace {

class VirtualStreams : public ::testing::Test {
 protected:
  // As torch.cuda.Stream.wait_stream does it.
  void wait_stream(Handle waiting, Handle awaited) {
    const Handle event = streams_.create_event();
    streams_.record(event, awaited);
    streams_.wait(waiting, event);
    streams_.destroy_event(event);
  }

  Streams streams_;
  Handle main_ = streams_.create_stream(0, 0);
  Handle side_ = streams_.create_stream(1, -3);
  Handle graph_ = 0;
};

TEST_F(VirtualStreams, RemembersWhatAStreamIs) {
  EXPECT_EQ(streams_.device(side_, 7), 1);
  EXPECT_EQ(streams_.priority(side_), -3);
  EXPECT_EQ(streams_.device(0, 7), 7) << "the default stream is the current device's";
  EXPECT_TRUE(streams_.destroy_stream(side_));
  EXPECT_FALSE(streams_.destroy_stream(side_));
}

TEST_F(VirtualStreams, ACaptureCountsWhatIsLaunched) {
  streams_.launch(main_);
  ASSERT_TRUE(streams_.begin_capture(main_));
  EXPECT_FALSE(streams_.begin_capture(main_)) << "it is being captured";
  const Handle into = streams_.capture(main_)->graph;
  streams_.launch(main_);
  streams_.launch(main_);
  streams_.launch(side_);
  EXPECT_EQ(streams_.end_capture(main_, &graph_), CaptureEnd::complete);
  EXPECT_EQ(graph_, into);
  EXPECT_EQ(streams_.nodes(graph_), 2U);
  EXPECT_FALSE(streams_.capture(main_));
  EXPECT_EQ(streams_.end_capture(main_, &graph_), CaptureEnd::unmatched);
  EXPECT_EQ(graph_, 0U);
}

TEST_F(VirtualStreams, TheDefaultStreamIsNeverCaptured) { EXPECT_FALSE(streams_.begin_capture(0)); }

TEST_F(VirtualStreams, AWaitingStreamJoinsTheCapture) {
  streams_.begin_capture(main_);
  wait_stream(side_, main_);
  ASSERT_TRUE(streams_.capture(side_));
  EXPECT_EQ(streams_.capture(side_)->id, streams_.capture(main_)->id);
  streams_.launch(side_);
  wait_stream(main_, side_);
  EXPECT_EQ(streams_.end_capture(side_, &graph_), CaptureEnd::unmatched) << "main_ began it";
  EXPECT_EQ(streams_.end_capture(main_, &graph_), CaptureEnd::complete);
  EXPECT_EQ(streams_.nodes(graph_), 1U);
  EXPECT_FALSE(streams_.capture(side_));
}

TEST_F(VirtualStreams, WorkThatNobodyWaitsForIsUnjoined) {
  streams_.begin_capture(main_);
  wait_stream(side_, main_);
  streams_.launch(side_);
  wait_stream(main_, side_);
  streams_.launch(side_);  // after main_ waited
  EXPECT_EQ(streams_.end_capture(main_, &graph_), CaptureEnd::unjoined);
  EXPECT_EQ(graph_, 0U);
  EXPECT_FALSE(streams_.capture(main_)) << "the capture is over all the same";
  EXPECT_FALSE(streams_.capture(side_));
}

TEST_F(VirtualStreams, AStreamThatOnlyWaitedNeedsNotBeJoined) {
  streams_.begin_capture(main_);
  streams_.launch(main_);
  wait_stream(side_, main_);
  EXPECT_EQ(streams_.end_capture(main_, &graph_), CaptureEnd::complete);
}

TEST_F(VirtualStreams, StreamsAreJoinedThroughOthers) {
  const Handle third = streams_.create_stream(0, 0);
  streams_.begin_capture(main_);
  wait_stream(side_, main_);
  streams_.launch(side_);
  wait_stream(third, side_);
  streams_.launch(third);
  wait_stream(main_, third);
  EXPECT_EQ(streams_.end_capture(main_, &graph_), CaptureEnd::complete);
  EXPECT_EQ(streams_.nodes(graph_), 2U);
}

TEST_F(VirtualStreams, EventsOfACaptureThatIsOverGiveNothing) {
  const Handle event = streams_.create_event();
  streams_.begin_capture(main_);
  streams_.record(event, main_);
  EXPECT_TRUE(streams_.captured_event(event));
  streams_.end_capture(main_, &graph_);
  EXPECT_FALSE(streams_.captured_event(event));
  streams_.wait(side_, event);
  EXPECT_FALSE(streams_.capture(side_));
}

TEST_F(VirtualStreams, ASecondCaptureStartsFromNothing) {
  streams_.begin_capture(main_);
  wait_stream(side_, main_);
  streams_.launch(side_);
  EXPECT_EQ(streams_.end_capture(main_, &graph_), CaptureEnd::unjoined);
  const std::uint64_t before = [&] {
    streams_.begin_capture(main_);
    return streams_.capture(main_)->id;
  }();
  EXPECT_EQ(streams_.end_capture(main_, &graph_), CaptureEnd::complete);
  EXPECT_EQ(streams_.nodes(graph_), 0U);
  streams_.begin_capture(main_);
  EXPECT_NE(streams_.capture(main_)->id, before);
}

TEST_F(VirtualStreams, WaitingForACapturedStreamSpoilsTheCapture) {
  EXPECT_FALSE(streams_.forbid_waiting(main_));
  streams_.begin_capture(main_);
  EXPECT_FALSE(streams_.forbid_waiting(side_));
  EXPECT_TRUE(streams_.forbid_waiting(main_));
  EXPECT_TRUE(streams_.capture(main_)->invalid);
  EXPECT_EQ(streams_.end_capture(main_, &graph_), CaptureEnd::invalid);
}

TEST_F(VirtualStreams, WaitingForTheDeviceSpoilsWhatTheModeSays) {
  for (const CaptureMode mode : {CaptureMode::global, CaptureMode::thread_local_}) {
    streams_.begin_capture(main_, mode);
    bool forbidden = false;
    std::thread([&] { forbidden = streams_.forbid_waiting_for_all(); }).join();
    EXPECT_EQ(forbidden, mode == CaptureMode::global);
    streams_.end_capture(main_, &graph_);
  }
  EXPECT_FALSE(streams_.forbid_waiting_for_all());
}

TEST_F(VirtualStreams, TimeIsTheNumberOfRecords) {
  const Handle begin = streams_.create_event();
  const Handle end = streams_.create_event();
  streams_.record(begin, main_);
  EXPECT_FALSE(streams_.milliseconds(begin, end)) << "one was never recorded";
  streams_.record(streams_.create_event(), side_);
  streams_.record(end, main_);
  EXPECT_EQ(streams_.milliseconds(begin, end), 2.0);
  EXPECT_EQ(streams_.milliseconds(end, begin), -2.0);
}

TEST_F(VirtualStreams, ThreadsCaptureSideBySide) {
  std::vector<std::thread> threads;
  for (int index = 0; index < 4; ++index) {
    threads.emplace_back([this] {
      const Handle own = streams_.create_stream(0, 0);
      const Handle fork = streams_.create_stream(0, 0);
      for (int round = 0; round < 100; ++round) {
        Handle graph = 0;
        ASSERT_TRUE(streams_.begin_capture(own, CaptureMode::thread_local_));
        streams_.launch(own);
        wait_stream(fork, own);
        streams_.launch(fork);
        wait_stream(own, fork);
        EXPECT_EQ(streams_.end_capture(own, &graph), CaptureEnd::complete);
        EXPECT_EQ(streams_.nodes(graph), 2U);
        streams_.destroy_graph(graph);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace
}  // namespace opacus_memprof::virtual_gpu
