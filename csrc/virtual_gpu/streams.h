// SPDX-License-Identifier: Apache-2.0
// Streams, events and captures of CUDA graphs as bookkeeping: everything that is asked for is done at once.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>

namespace virtual_gpu {

using Handle = std::uintptr_t;  // what a cudaStream_t, cudaEvent_t, cudaGraph_t … holds

struct Capture {
  std::uint64_t id = 0;
  Handle graph = 0;
  Handle origin = 0;  // the stream that began it, and that must end it
};

// Thread safe. Handle 0 is a device's default stream, which is never captured.
class Streams {
 public:
  Handle create_handle();  // that is no other object's

  Handle create_stream(int device, int priority);
  bool destroy_stream(Handle stream);
  [[nodiscard]] int priority(Handle stream) const;
  [[nodiscard]] int device(Handle stream, int current) const;

  Handle create_event();
  void destroy_event(Handle event);
  // An event takes the capture of its stream, and gives it to the streams that wait for it.
  void record(Handle event, Handle stream);
  void wait(Handle stream, Handle event);
  [[nodiscard]] double milliseconds(Handle begin, Handle end) const;

  // False where the stream is captured already; what is launched is put into `graph`, a new one where 0.
  bool begin_capture(Handle stream, Handle graph = 0);
  // The graph; nothing where this stream did not begin a capture.
  std::optional<Handle> end_capture(Handle stream);
  [[nodiscard]] std::optional<Capture> capture(Handle stream) const;

  // A kernel, copy or fill in this stream: a node of the graph where it is captured.
  void launch(Handle stream);
  [[nodiscard]] std::size_t nodes(Handle graph) const;
  Handle create_graph();
  void destroy_graph(Handle graph);

 private:
  struct Stream {
    int device = 0;
    int priority = 0;
    std::uint64_t capture = 0;
  };
  struct Event {
    std::chrono::steady_clock::time_point time;
    std::uint64_t capture = 0;
  };

  Handle next_handle() { return next_ += 16; }

  mutable std::mutex mutex_;
  Handle next_ = 0x10000;
  std::uint64_t captures_begun_ = 0;
  std::unordered_map<Handle, Stream> streams_;
  std::unordered_map<Handle, Event> events_;
  std::unordered_map<std::uint64_t, Capture> captures_;
  std::unordered_map<Handle, std::size_t> graphs_;  // to the number of nodes
};

}  // namespace virtual_gpu
