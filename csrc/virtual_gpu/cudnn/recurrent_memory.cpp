// SPDX-License-Identifier: Apache-2.0
// The formulas are read off what cuDNN 9.19 says on an H200, by
// benchmarks/virtual_gpu/recurrent_workspaces.py, and equal to the byte in all layers asked for
// there (docs/virtual_gpu_workspaces.md). Every buffer starts at a multiple of 32 bytes.
#include <algorithm>

#include "virtual_gpu/cudnn/recurrent.h"

namespace opacus_memprof::virtual_gpu {
namespace {

constexpr std::int64_t kHeader = 256;

std::int64_t buffer(std::int64_t bytes) {
  constexpr std::int64_t kAligned = 32;
  return (bytes + kAligned - 1) / kAligned * kAligned;
}

bool projects(const RecurrentDescriptor& recurrent) {
  return recurrent.projected != recurrent.hidden;
}

std::int64_t matrices_of(const RecurrentDescriptor& recurrent, std::int64_t pseudo_layer) {
  const std::int64_t per_gate =
      recurrent.hidden * (input_of(recurrent, pseudo_layer) + recurrent.projected);
  return gates(recurrent) * per_gate +
         (projects(recurrent) ? recurrent.hidden * recurrent.projected : 0);
}

// Bytes by which the buffers are measured.
struct Pieces {
  std::int64_t one;     // number
  std::int64_t rows;    // steps of all sequences
  std::int64_t input;   // of all steps
  std::int64_t states;  // of all steps, in one layer and direction
  std::int64_t output;  // of all steps
  std::int64_t last;    // state of the last step, in all layers and directions
  bool lstm;
  bool both;    // directions
  bool padded;  // sequences have the same length, or are filled up to it
};

Pieces pieces_of(const RecurrentDescriptor& recurrent, const SequenceDescriptor& sequence) {
  Pieces pieces{};
  pieces.one = static_cast<std::int64_t>(element_size(recurrent.type));
  pieces.padded = (recurrent.flags & CUDNN_RNN_PADDED_IO_ENABLED) != 0;
  pieces.rows = pieces.padded ? sequence.steps * sequence.batch : sequence.lengths;
  pieces.input = pieces.one * pieces.rows * recurrent.input;
  pieces.states = pieces.one * pieces.rows * recurrent.hidden;
  pieces.output = pieces.one * pieces.rows * recurrent.directions * recurrent.projected;
  pieces.last =
      pieces.one * recurrent.layers * recurrent.directions * sequence.batch * recurrent.hidden;
  pieces.lstm = recurrent.mode == CUDNN_LSTM;
  pieces.both = recurrent.directions == 2;
  return pieces;
}

// Steps of one layer that are in work while its neighbours are at others.
std::int64_t steps_in_flight(const RecurrentDescriptor& recurrent,
                             const SequenceDescriptor& sequence) {
  if (recurrent.layers == 1) {
    return sequence.steps;
  }
  std::int64_t together = 2;
  if (sequence.batch < 2) {
    together = 32;
  } else if (sequence.batch <= 8) {
    together = 16;
  } else if (sequence.batch <= 16 || sequence.steps > 100) {
    together = 8;
  } else if (sequence.batch <= 96) {
    together = 4;
  }
  return together * recurrent.layers + std::max<std::int64_t>(together, 8);
}

struct Passes {
  std::int64_t forward;
  std::int64_t backward;
};

Passes standard(const RecurrentDescriptor& recurrent, const SequenceDescriptor& sequence,
                const Pieces& of) {
  const std::int64_t shared = (of.lstm ? buffer(2 * of.last) : 0) +
                              (of.both ? buffer(2 * of.last) : 0) +
                              (projects(recurrent) ? buffer(recurrent.directions * of.states) : 0);
  const auto rows_of = [&](std::int64_t steps) {
    return of.one * std::min(steps * sequence.batch, of.rows) * recurrent.hidden;
  };
  constexpr std::int64_t kSteps = 256;  // whose gates are in work
  const std::int64_t all_gates = gates(recurrent);
  const std::int64_t wide = std::max(of.input, of.states);
  std::int64_t forward = shared + buffer(all_gates * of.last);
  std::int64_t backward = shared + buffer(of.last);
  if (of.both) {
    forward += buffer(2 * all_gates * of.states) + buffer(4 * of.states);
    backward += buffer(4 * wide) + buffer((recurrent.layers == 1 ? 2 : 4) * of.states);
  } else {
    forward +=
        buffer(all_gates * rows_of(kSteps)) + (recurrent.dropout > 0 ? buffer(of.states) : 0);
    backward += buffer(wide) + buffer(rows_of(steps_in_flight(recurrent, sequence)));
  }
  return {forward, backward};
}

// Kernels that keep the weights in registers or shared memory.
Passes persistent(const RecurrentDescriptor& recurrent, const SequenceDescriptor& sequence,
                  const Pieces& of) {
  const std::int64_t all_gates = gates(recurrent);
  const std::int64_t shared =
      buffer(2 * of.last) + (of.lstm ? buffer(2 * of.last) : 0) + (of.both ? buffer(of.last) : 0);
  std::int64_t forward = shared;
  if (of.both) {
    forward += buffer(2 * all_gates * of.states) + buffer(4 * all_gates * of.states) +
               buffer(4 * of.states);
  } else {
    forward += buffer(all_gates * of.states) + buffer(4 * all_gates * of.states) +
               (recurrent.dropout > 0 ? buffer(of.states) : 0);
  }
  std::int64_t rows = 8 * of.rows;
  if (recurrent.algorithm != CUDNN_RNN_ALGO_PERSIST_STATIC_SMALL_H) {
    constexpr std::int64_t kLeast = 2432;
    rows = std::max(rows, kLeast + sequence.batch);
  }
  const std::int64_t gradients = recurrent.mode == CUDNN_GRU ? 6 : all_gates;
  const std::int64_t between = recurrent.directions * (recurrent.layers == 1 ? 1 : 2);
  const std::int64_t backward = shared + buffer((of.both ? 4 : 1) * std::max(of.input, of.states)) +
                                buffer(between * of.states) + buffer(gradients * of.states) +
                                buffer(of.one * rows * recurrent.hidden);
  return {forward, backward};
}

}  // namespace

std::int64_t gates(const RecurrentDescriptor& recurrent) {
  switch (recurrent.mode) {
    case CUDNN_LSTM:
      return 4;
    case CUDNN_GRU:
      return 3;
    default:
      return 1;
  }
}

std::int64_t input_of(const RecurrentDescriptor& recurrent, std::int64_t pseudo_layer) {
  return pseudo_layer < recurrent.directions ? recurrent.input
                                             : recurrent.projected * recurrent.directions;
}

std::int64_t matrices_before(const RecurrentDescriptor& recurrent, std::int64_t pseudo_layer) {
  std::int64_t total = 0;
  for (std::int64_t layer = 0; layer < pseudo_layer; ++layer) {
    total += matrices_of(recurrent, layer);
  }
  return total;
}

// Each layer and direction runs on a stream of its own, with a share for cuBLAS. What is padded is
// packed first, and its gradients too.
std::int64_t recurrent_workspace(const RecurrentDescriptor& recurrent,
                                 const SequenceDescriptor& sequence, bool training) {
  constexpr std::int64_t kStream = std::int64_t{8} << 20U;
  constexpr std::int64_t kIndices = 8;  // bytes for each sequence
  const Pieces of = pieces_of(recurrent, sequence);
  const std::int64_t layers = recurrent.layers * recurrent.directions;
  Passes passes = recurrent.algorithm == CUDNN_RNN_ALGO_STANDARD
                      ? standard(recurrent, sequence, of)
                      : persistent(recurrent, sequence, of);
  std::int64_t common =
      kHeader + kStream * layers + buffer(of.one * matrices_before(recurrent, layers));
  if (of.padded) {
    const std::int64_t last_outputs = of.one * layers * sequence.batch * recurrent.projected;
    const std::int64_t packed = buffer(of.input) + buffer(of.output) + 2 * buffer(last_outputs) +
                                (of.lstm ? 2 * buffer(of.last) : 0);
    passes.forward += packed;
    passes.backward += 2 * packed;
    common += buffer(kIndices * sequence.batch);
  }
  return common + (training ? std::max(passes.forward, passes.backward) : passes.forward);
}

// Of each layer gates and states, what goes from layer to layer, the masks of dropout (one bit a
// number), and with a projection what it has made of the states.
std::int64_t recurrent_reserve(const RecurrentDescriptor& recurrent,
                               const SequenceDescriptor& sequence) {
  const Pieces of = pieces_of(recurrent, sequence);
  const std::int64_t states = recurrent.directions * of.states;
  const std::int64_t between = recurrent.layers - 1;
  std::int64_t total = kHeader + buffer(between * states);
  if (of.lstm) {
    total += buffer(recurrent.layers * 4 * states) + buffer(recurrent.layers * states);
  } else {
    total += buffer(recurrent.layers * (recurrent.mode == CUDNN_GRU ? 6 : 1) * states);
  }
  if (recurrent.dropout > 0) {
    const std::int64_t numbers =
        sequence.steps * sequence.batch * recurrent.directions * recurrent.projected;
    total += between * recurrent.directions * buffer((numbers + 7) / 8);
  }
  if (projects(recurrent)) {
    total += buffer(recurrent.layers * states) + buffer(recurrent.layers * of.output);
  }
  return total;
}

}  // namespace opacus_memprof::virtual_gpu
