// SPDX-License-Identifier: Apache-2.0
// Reads the pickles of torch.cuda.memory._dump_snapshot. Runs no code from them: opcodes that
// import or call anything are refused. What is read is bounded by the size of the file: every dict
// of a trace becomes one entry when it is complete, and equal stacks become one.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

namespace opacus_memprof {

struct TorchSnapshot {
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  // Indices of strings, and a line.
  struct Frame {
    std::uint32_t name;
    std::uint32_t file;
    std::uint32_t line;
  };
  // A node of the tree of all stacks: its frame is called from the node `caller`. Node 0 is the
  // empty stack.
  struct Call {
    std::uint32_t caller;
    std::uint32_t frame;
  };
  // An entry of device_traces[device]. `action` and `metadata` are indices of strings, or kNone.
  struct Entry {
    std::uint64_t address;
    std::uint64_t size;
    std::uint64_t stream;
    std::uint64_t time_us;  // since 1970
    std::uint32_t stack;
    std::uint32_t action;
    std::uint32_t metadata;
    std::uint32_t device;
  };
  // A block of a segment of `device`. `state` and `metadata` are indices of strings.
  struct Block {
    std::uint64_t address;
    std::uint64_t size;
    std::uint64_t requested;
    std::uint64_t stream;
    std::uint32_t stack;
    std::uint32_t state;
    std::uint32_t metadata;
    std::uint32_t device;
    std::uint64_t segment;  // index of the segment
  };
  struct Segment {
    std::uint64_t address;
    std::uint64_t size;
    std::uint64_t stream;
    std::uint32_t device;
    std::uint32_t expandable;
  };

  std::deque<std::string> strings;  // whose elements stay where they are
  std::vector<Frame> frames;
  std::vector<Call> calls;
  std::vector<Entry> entries;  // device by device, in order
  std::vector<Block> blocks;   // segment by segment
  std::vector<Segment> segments;
};

// Throws std::runtime_error, with a phrase that says what is wrong with the file.
TorchSnapshot read_torch_snapshot(const std::string& path);

}  // namespace opacus_memprof
