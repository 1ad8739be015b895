// SPDX-License-Identifier: Apache-2.0
// Streams, events and captures of CUDA graphs as bookkeeping: everything that is asked for is done
// at once.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

namespace opacus_memprof::virtual_gpu {

using Handle = std::uintptr_t;  // what a cudaStream_t, cudaEvent_t, cudaGraph_t … holds

enum class CaptureMode : std::uint8_t { global, thread_local_, relaxed };

struct Capture {
  std::uint64_t id = 0;
  Handle graph = 0;
  Handle origin = 0;  // the stream that began it, and that must end it
  CaptureMode mode = CaptureMode::global;
  std::thread::id thread;  // that began it
  bool invalid = false;    // something was done that a capture does not allow
};

enum class CaptureEnd : std::uint8_t { complete, unmatched, unjoined, invalid };

// Thread safe. Handle 0 is a device's default stream, which is never captured.
class Streams {
 public:
  Handle create_handle();  // different from all handles before

  Handle create_stream(int device, int priority);
  bool destroy_stream(Handle stream);
  [[nodiscard]] int priority(Handle stream) const;
  [[nodiscard]] int device(Handle stream, int current) const;

  Handle create_event();
  void destroy_event(Handle event);
  // An event takes the capture of its stream, and gives it to the streams that wait for it.
  void record(Handle event, Handle stream);
  void wait(Handle stream, Handle event);
  [[nodiscard]] bool captured_event(Handle event) const;
  // The time between two records: 1 ms for each record from one to the other, so that programs
  // measure the same in every run, and never 0. Nothing if one of the two was never recorded.
  [[nodiscard]] std::optional<double> milliseconds(Handle begin, Handle end) const;

  // Returns false if the stream is captured already. Launches go into `graph`; 0 makes a new one.
  bool begin_capture(Handle stream, CaptureMode mode = CaptureMode::global, Handle graph = 0);
  // `graph` is 0 unless the capture is complete. The capture is unjoined if another stream has
  // launched into the graph, and the stream that began the capture has not waited for it.
  CaptureEnd end_capture(Handle stream, Handle* graph);
  [[nodiscard]] std::optional<Capture> capture(Handle stream) const;
  // Whether this may not be waited for, being captured. The capture is invalid from then on.
  bool forbid_waiting(Handle stream);
  // The same for everything that runs on the devices.
  bool forbid_waiting_for_all();

  // What a copy or a fill does; a kernel does nothing.
  using Work = std::function<void()>;

  // A kernel, copy or fill in this stream. Its work is done now or, where the stream is captured,
  // with each replay of the graph, of which it is a node.
  void launch(Handle stream, Work work = {});
  // Adds work to the last node of the graph that is being captured, or to one for it; false where
  // none is.
  bool add_work(Handle stream, Work work);
  // Whether any stream is being captured.
  [[nodiscard]] bool capturing() const noexcept { return capturing_.load() > 0; }
  [[nodiscard]] std::size_t nodes(Handle graph) const;
  Handle create_graph();
  void destroy_graph(Handle graph);
  // A graph as it is now, for replays. It outlives the graph.
  Handle instantiate(Handle graph);
  void destroy_executable(Handle executable);
  // Does the work of all nodes in order, or adds it to the graph that the stream is captured into.
  void replay(Handle executable, Handle stream);

 private:
  // How many launches of each stream into a graph are known to be over.
  using Progress = std::map<Handle, std::size_t>;

  struct Stream {
    int device = 0;
    int priority = 0;
    std::uint64_t capture = 0;
    Progress progress;  // of the capture, its own launches among them
  };
  struct Graph {
    std::size_t nodes = 0;
    std::vector<Work> work;
  };
  struct Event {
    std::uint64_t time = 0;  // 0 where it was never recorded
    std::uint64_t capture = 0;
    Progress progress;
  };

  Handle next_handle() { return next_ += 16; }
  // Of the stream's capture; nullptr where it is not captured.
  Graph* graph_of(Handle stream);

  mutable std::mutex mutex_;
  Handle next_ = 0x10000;
  std::uint64_t records_ = 0;
  std::uint64_t captures_begun_ = 0;
  std::unordered_map<Handle, Stream> streams_;
  std::unordered_map<Handle, Event> events_;
  std::unordered_map<std::uint64_t, Capture> captures_;
  std::unordered_map<Handle, Graph> graphs_;
  std::unordered_map<Handle, std::shared_ptr<const Graph>> executables_;
  std::atomic<std::size_t> capturing_ = 0;
};

}  // namespace opacus_memprof::virtual_gpu
