// SPDX-License-Identifier: Apache-2.0
#include "virtual_gpu/machine/streams.h"

#include <algorithm>

namespace opacus_memprof::virtual_gpu {

Handle Streams::create_handle() {
  const std::lock_guard lock(mutex_);
  return next_handle();
}

Handle Streams::create_stream(int device, int priority) {
  const std::lock_guard lock(mutex_);
  const Handle stream = next_handle();
  streams_[stream] = {device, priority, 0, {}};
  return stream;
}

bool Streams::destroy_stream(Handle stream) {
  const std::lock_guard lock(mutex_);
  return streams_.erase(stream) > 0;
}

int Streams::priority(Handle stream) const {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream);
  return found == streams_.end() ? 0 : found->second.priority;
}

int Streams::device(Handle stream, int current) const {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream);
  return found == streams_.end() ? current : found->second.device;
}

Handle Streams::create_event() {
  const std::lock_guard lock(mutex_);
  const Handle event = next_handle();
  events_[event] = {};
  return event;
}

void Streams::destroy_event(Handle event) {
  const std::lock_guard lock(mutex_);
  events_.erase(event);
}

void Streams::record(Handle event, Handle stream) {
  const std::lock_guard lock(mutex_);
  Event& recorded = events_[event];
  recorded = {++records_, 0, {}};
  if (const auto found = streams_.find(stream); found != streams_.end()) {
    recorded.capture = found->second.capture;
    recorded.progress = found->second.progress;
  }
}

void Streams::wait(Handle stream, Handle event) {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream);
  const auto awaited = events_.find(event);
  if (found == streams_.end() || awaited == events_.end() ||
      !captures_.contains(awaited->second.capture)) {
    return;
  }
  Stream& waiting = found->second;
  waiting.capture = awaited->second.capture;
  for (const auto& [other, launches] : awaited->second.progress) {
    std::size_t& known = waiting.progress[other];
    known = std::max(known, launches);
  }
}

bool Streams::captured_event(Handle event) const {
  const std::lock_guard lock(mutex_);
  const auto found = events_.find(event);
  return found != events_.end() && captures_.contains(found->second.capture);
}

std::optional<double> Streams::milliseconds(Handle begin, Handle end) const {
  const std::lock_guard lock(mutex_);
  const auto from = events_.find(begin);
  const auto to = events_.find(end);
  if (from == events_.end() || to == events_.end() || from->second.time == 0 ||
      to->second.time == 0) {
    return std::nullopt;
  }
  return static_cast<double>(to->second.time) - static_cast<double>(from->second.time);
}

bool Streams::begin_capture(Handle stream, CaptureMode mode, Handle graph) {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream);
  if (found == streams_.end() || found->second.capture != 0) {
    return false;
  }
  if (graph == 0) {
    graph = next_handle();
  }
  graphs_.try_emplace(graph);
  const std::uint64_t id = ++captures_begun_;
  captures_[id] = {id, graph, stream, mode, std::this_thread::get_id(), false};
  found->second.capture = id;
  ++capturing_;
  return true;
}

CaptureEnd Streams::end_capture(Handle stream, Handle* graph) {
  const std::lock_guard lock(mutex_);
  *graph = 0;
  const auto origin = streams_.find(stream);
  const auto capture =
      origin == streams_.end() ? captures_.end() : captures_.find(origin->second.capture);
  if (capture == captures_.end() || capture->second.origin != stream) {
    return CaptureEnd::unmatched;
  }
  const Capture ended = capture->second;
  captures_.erase(capture);
  --capturing_;
  const Progress waited_for = origin->second.progress;
  bool joined = true;
  for (auto& [handle, other] : streams_) {
    if (other.capture == ended.id) {
      const auto own = other.progress.find(handle);
      const auto known = waited_for.find(handle);
      joined = joined && (own == other.progress.end() ||
                          (known != waited_for.end() && known->second >= own->second));
      other.capture = 0;
      other.progress.clear();
    }
  }
  if (ended.invalid || !joined) {
    graphs_.erase(ended.graph);
    return ended.invalid ? CaptureEnd::invalid : CaptureEnd::unjoined;
  }
  *graph = ended.graph;
  return CaptureEnd::complete;
}

std::optional<Capture> Streams::capture(Handle stream) const {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream);
  if (found == streams_.end()) {
    return std::nullopt;
  }
  const auto capture = captures_.find(found->second.capture);
  return capture == captures_.end() ? std::nullopt : std::optional(capture->second);
}

bool Streams::forbid_waiting(Handle stream) {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream);
  const auto capture =
      found == streams_.end() ? captures_.end() : captures_.find(found->second.capture);
  if (capture == captures_.end()) {
    return false;
  }
  capture->second.invalid = true;
  return true;
}

bool Streams::forbid_waiting_for_all() {
  const std::lock_guard lock(mutex_);
  bool any = false;
  for (auto& [id, capture] : captures_) {
    if (capture.mode == CaptureMode::global || capture.thread == std::this_thread::get_id()) {
      capture.invalid = any = true;
    }
  }
  return any;
}

Streams::Graph* Streams::graph_of(Handle stream) {
  const auto found = streams_.find(stream);
  if (found == streams_.end()) {
    return nullptr;
  }
  const auto capture = captures_.find(found->second.capture);
  return capture == captures_.end() ? nullptr : &graphs_[capture->second.graph];
}

void Streams::launch(Handle stream, Work work) {
  if (capturing()) {
    const std::lock_guard lock(mutex_);
    if (Graph* const graph = graph_of(stream)) {
      ++graph->nodes;
      ++streams_[stream].progress[stream];
      if (work) {
        graph->work.push_back(std::move(work));
      }
      return;
    }
  }
  if (work) {
    work();
  }
}

bool Streams::add_work(Handle stream, Work work) {
  const std::lock_guard lock(mutex_);
  Graph* const graph = graph_of(stream);
  if (graph != nullptr) {
    graph->nodes = std::max(graph->nodes, std::size_t{1});
    graph->work.push_back(std::move(work));
  }
  return graph != nullptr;
}

std::size_t Streams::nodes(Handle graph) const {
  const std::lock_guard lock(mutex_);
  const auto found = graphs_.find(graph);
  return found == graphs_.end() ? 0 : found->second.nodes;
}

Handle Streams::create_graph() {
  const std::lock_guard lock(mutex_);
  const Handle graph = next_handle();
  graphs_[graph] = {};
  return graph;
}

void Streams::destroy_graph(Handle graph) {
  const std::lock_guard lock(mutex_);
  graphs_.erase(graph);
}

Handle Streams::instantiate(Handle graph) {
  const std::lock_guard lock(mutex_);
  const Handle executable = next_handle();
  executables_[executable] = std::make_shared<const Graph>(graphs_[graph]);
  return executable;
}

void Streams::destroy_executable(Handle executable) {
  std::shared_ptr<const Graph> last;  // what it holds is freed without the lock
  const std::lock_guard lock(mutex_);
  if (const auto found = executables_.find(executable); found != executables_.end()) {
    last = std::move(found->second);
    executables_.erase(found);
  }
}

void Streams::replay(Handle executable, Handle stream) {
  std::shared_ptr<const Graph> graph;
  {
    const std::lock_guard lock(mutex_);
    const auto found = executables_.find(executable);
    if (found == executables_.end()) {
      return;
    }
    graph = found->second;
  }
  launch(stream, [graph] {
    for (const Work& work : graph->work) {
      work();
    }
  });
}

}  // namespace opacus_memprof::virtual_gpu
