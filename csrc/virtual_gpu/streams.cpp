// SPDX-License-Identifier: Apache-2.0
#include "virtual_gpu/streams.h"

#include <algorithm>

namespace virtual_gpu {

Handle Streams::create_handle() {
  const std::lock_guard lock(mutex_);
  return next_handle();
}

Handle Streams::create_stream(int device, int priority) {
  const std::lock_guard lock(mutex_);
  const Handle stream = next_handle();
  streams_[stream] = {device, priority, 0};
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
  events_[event] = {std::chrono::steady_clock::now(), 0};
  return event;
}

void Streams::destroy_event(Handle event) {
  const std::lock_guard lock(mutex_);
  events_.erase(event);
}

void Streams::record(Handle event, Handle stream) {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream);
  events_[event] = {std::chrono::steady_clock::now(),
                    found == streams_.end() ? 0 : found->second.capture};
}

void Streams::wait(Handle stream, Handle event) {
  const std::lock_guard lock(mutex_);
  const auto waiting = streams_.find(stream);
  const auto found = events_.find(event);
  if (waiting != streams_.end() && found != events_.end() &&
      captures_.contains(found->second.capture)) {
    waiting->second.capture = found->second.capture;
  }
}

double Streams::milliseconds(Handle begin, Handle end) const {
  const std::lock_guard lock(mutex_);
  const auto from = events_.find(begin);
  const auto to = events_.find(end);
  if (from == events_.end() || to == events_.end()) {
    return 0;
  }
  const std::chrono::duration<double, std::milli> passed = to->second.time - from->second.time;
  return std::max(passed.count(), 1e-3);  // programs divide by it
}

bool Streams::begin_capture(Handle stream, Handle graph) {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream);
  if (found == streams_.end() || found->second.capture != 0) {
    return false;
  }
  if (graph == 0) {
    graph = next_handle();
  }
  graphs_.try_emplace(graph, 0);
  const std::uint64_t id = ++captures_begun_;
  captures_[id] = {id, graph, stream};
  found->second.capture = id;
  return true;
}

std::optional<Handle> Streams::end_capture(Handle stream) {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream);
  const auto capture =
      found == streams_.end() ? captures_.end() : captures_.find(found->second.capture);
  if (capture == captures_.end() || capture->second.origin != stream) {
    return std::nullopt;
  }
  const Capture ended = capture->second;
  captures_.erase(capture);
  for (auto& [handle, other] : streams_) {
    if (other.capture == ended.id) {
      other.capture = 0;
    }
  }
  return ended.graph;
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

void Streams::launch(Handle stream) {
  const std::lock_guard lock(mutex_);
  if (captures_.empty()) {
    return;
  }
  const auto found = streams_.find(stream);
  if (found == streams_.end()) {
    return;
  }
  if (const auto capture = captures_.find(found->second.capture); capture != captures_.end()) {
    ++graphs_[capture->second.graph];
  }
}

std::size_t Streams::nodes(Handle graph) const {
  const std::lock_guard lock(mutex_);
  const auto found = graphs_.find(graph);
  return found == graphs_.end() ? 0 : found->second;
}

Handle Streams::create_graph() {
  const std::lock_guard lock(mutex_);
  const Handle graph = next_handle();
  graphs_[graph] = 0;
  return graph;
}

void Streams::destroy_graph(Handle graph) {
  const std::lock_guard lock(mutex_);
  graphs_.erase(graph);
}

}  // namespace virtual_gpu
