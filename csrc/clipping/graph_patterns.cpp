// SPDX-License-Identifier: Apache-2.0
#include "clipping/graph_patterns.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>

#include "clipping/hashing.h"

namespace opacus_memprof::clipping {
namespace {

using torch::autograd::Node;

constexpr int kDepth = 3;

std::uint64_t hash_of_operation(const Node& node, std::int64_t batch) {
  // Every torch.autograd.Function has the same class in C++, which is defined in torch's Python
  // library.
  static const std::size_t kCustom = std::hash<std::string_view>{}("N5torch8autograd6PyNodeE");
  const std::size_t kind = std::hash<std::string_view>{}(typeid(node).name());
  if (kind == kCustom) return mix(1, std::hash<std::string>{}(node.name()));
  std::uint64_t hash = mix(2, kind);
  // A parameter's first dimension may equal the batch size by chance.
  if (dynamic_cast<const torch::autograd::AccumulateGrad*>(&node) != nullptr ||
      node.num_inputs() == 0)
    return hash;
  const auto& metadata = node.input_metadata(0);
  if (metadata.is_nested_tensor()) return hash;
  const auto shape = metadata.shape_as_dim_vector();
  if (shape.empty()) return mix(hash, 3);
  const auto first = shape.front().maybe_as_int();
  return mix(mix(hash, 4 + shape.size()), first == batch ? 2 : first == 1 ? 1 : 0);
}

}  // namespace

std::vector<std::int64_t> graph_patterns(const std::vector<at::Tensor>& outputs,
                                         const std::vector<at::Tensor>& inputs,
                                         std::int64_t batch) {
  std::unordered_set<const Node*> ends;
  for (const at::Tensor& input : inputs) {
    if (input.requires_grad()) {
      ends.insert(torch::autograd::impl::gradient_edge(input).function.get());
    }
  }
  std::vector<const Node*> nodes;
  std::unordered_map<const Node*, std::size_t> places;
  const auto visit = [&](const Node* node) {
    if (node == nullptr || ends.count(node) != 0) return;
    if (places.emplace(node, nodes.size()).second) nodes.push_back(node);
  };
  for (const at::Tensor& output : outputs) visit(output.grad_fn().get());
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const Node* node = nodes[i];  // `nodes` grows
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  std::vector<std::uint64_t> operations(nodes.size());
  std::transform(nodes.begin(), nodes.end(), operations.begin(),
                 [batch](const Node* node) { return hash_of_operation(*node, batch); });
  struct Edge {
    std::size_t from, to;  // `to` is nodes.size() if it leads on to no node
    std::uint64_t input;
  };
  std::vector<Edge> edges;  // by `from`
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    for (const auto& edge : nodes[i]->next_edges()) {
      const auto place = places.find(edge.function.get());
      const bool leads_on = place != places.end();
      edges.push_back({i, leads_on ? place->second : nodes.size(), leads_on ? edge.input_nr : 0});
    }
  }
  std::vector<std::uint64_t> hashes = operations;
  hashes.push_back(0);  // of what an edge to no node leads to
  std::vector<std::uint64_t> next;
  for (int depth = 0; depth < kDepth; ++depth) {
    next = operations;
    next.push_back(0);
    for (const Edge& edge : edges)
      next[edge.from] = mix(mix(next[edge.from], hashes[edge.to]), edge.input);
    hashes.swap(next);
  }
  hashes.pop_back();
  std::vector<std::int64_t> patterns(hashes.begin(), hashes.end());
  std::sort(patterns.begin(), patterns.end());
  patterns.erase(std::unique(patterns.begin(), patterns.end()), patterns.end());
  return patterns;
}

}  // namespace opacus_memprof::clipping
