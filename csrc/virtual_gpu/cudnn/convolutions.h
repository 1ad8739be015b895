// SPDX-License-Identifier: Apache-2.0
// Which convolution a plan is for, and the workspace that cuDNN chooses for it on a GPU.
//
// cuDNN's choice without a GPU (cudnn_library.h) is the one with a GPU for nearly all fp32
// convolutions and for most of the others; not where an engine asks cuBLASLt, or the occupancy of a
// kernel, which take a GPU. Those of common networks were measured and are in a table, and for the
// rest there is a rule. docs/virtual_gpu_workspaces.md says how exact that is.
#pragma once

#include <cudnn.h>
#include <cudnn_backend.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace opacus_memprof::virtual_gpu {

enum class Direction : char { forward = 'f', data = 'd', filter = 'w' };

struct Convolution {
  Direction direction = Direction::forward;
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  bool channels_last = false;
  std::vector<std::int64_t> input, weight;  // sizes
  std::vector<std::int64_t> stride, padding, dilation;
};

// How torch lets an engine multiply: fp32 numbers plainly while TF32 is off. An engine that needs
// no tensor cores may be its choice either way.
enum class Multiply { plain, tensor_cores, either };

// An engine that may split sums among blocks that wait for one another, as its configuration says:
// which size of tile (a number of cuDNN's) each block computes, and how many blocks make a cluster.
struct Split {
  std::int64_t tile = 0;
  std::int64_t rows = 1, columns = 1;
};

struct Workspace {
  std::int64_t bytes = 0;
  bool measured = false;  // and not derived from other batch sizes
};

// The workspace of the first choice from the table, an upper bound for most batch sizes that are
// not in it; nullopt if nothing like it was measured. `chosen` is cuDNN's choice without a GPU.
std::optional<Workspace> measured_workspace(const Convolution& convolution, Multiply multiply,
                                            std::int64_t chosen);

// Of different convolutions, which are one in each direction, at each size.
std::string description(const Convolution& convolution, Multiply multiply);

// The rule outside the table, for a GPU of so many multiprocessors.
std::int64_t estimated_workspace(const Convolution& convolution, Multiply multiply,
                                 const std::optional<Split>& split, std::int64_t multiprocessors,
                                 std::int64_t chosen);

// Follows what is set in cuDNN's descriptors, from tensors to plans. Thread safe.
class Convolutions {
 public:
  void set(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
           cudnnBackendAttributeType_t type, std::int64_t count, const void* elements);
  // A heuristic gave this engine configuration; it is the first of all, or of all that multiply
  // so.
  void choose(cudnnBackendDescriptor_t heuristic, cudnnBackendDescriptor_t configuration,
              Multiply multiply, const std::optional<Split>& split);
  void forget(cudnnBackendDescriptor_t descriptor);
  // Of a plan; `chosen` where nothing else is known. The table counts if the GPU, of so many
  // multiprocessors, is of the kind that was `measured`.
  std::int64_t workspace(cudnnBackendDescriptor_t plan, std::int64_t chosen, bool measured,
                         std::int64_t multiprocessors);
  // How many convolutions had a workspace that was not measured, and the largest one's bytes.
  [[nodiscard]] std::pair<std::size_t, std::int64_t> estimated() const;

 private:
  struct Tensor {
    cudnnDataType_t type = CUDNN_DATA_FLOAT;
    std::vector<std::int64_t> dims, strides;
  };
  struct Chosen {
    std::shared_ptr<const Convolution> convolution;
    Multiply multiply = Multiply::plain;
    std::optional<Split> split;
    bool first = false;
  };

  void read_tensor(Convolution& convolution, cudnnBackendDescriptor_t tensor, bool weight) const;

  mutable std::mutex mutex_;
  std::map<cudnnBackendDescriptor_t, Tensor> tensors_;
  std::map<cudnnBackendDescriptor_t, Convolution> geometries_;
  std::map<cudnnBackendDescriptor_t, std::shared_ptr<Convolution>> operations_;
  std::map<cudnnBackendDescriptor_t, Chosen> chosen_;  // graphs, heuristics, configurations, plans
  std::set<std::string> estimated_;
  std::int64_t largest_estimated_ = 0;
};

Convolutions& convolutions();

}  // namespace opacus_memprof::virtual_gpu
