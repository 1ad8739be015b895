// SPDX-License-Identifier: Apache-2.0
// Python bindings of the code that flash_clip runs for each layer; definitions only.
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>

#include "clipping/convolution.h"
#include "clipping/gradient_tap.h"
#include "clipping/graph_patterns.h"
#include "clipping/module_hook.h"
#include "clipping/operation_log.h"
#include "clipping/stacks.h"
#include "clipping/step.h"

namespace clipping = opacus_memprof::clipping;

PYBIND11_MODULE(_clipping, module) {
  module.def("tap_gradient", &clipping::tap_gradient);
  module.def("is_backward_of_inputs", &clipping::is_backward_of_inputs);
  module.def("graph_patterns", &clipping::graph_patterns);
  pybind11::class_<clipping::OperationLog>(module, "OperationLog")
      .def(pybind11::init<>())
      .def(pybind11::pickle(  // a copy of a model proves its forwards itself
          [](const clipping::OperationLog&) { return pybind11::tuple(); },
          [](const pybind11::tuple&) { return std::make_unique<clipping::OperationLog>(); }))
      .def("begin", &clipping::OperationLog::begin, pybind11::arg("with_inner") = true)
      .def("end", &clipping::OperationLog::end)
      .def("learn", &clipping::OperationLog::learn);
  module.def("unfold", &clipping::unfold);
  module.def("group_alike", &clipping::group_alike);
  module.def("address_table", &clipping::address_table);
  module.def("product_table", &clipping::product_table);
  module.def("begin_tables_of_graph", &clipping::begin_tables_of_graph);
  module.def("end_tables_of_graph", &clipping::end_tables_of_graph);
  module.def("empty_sums", &clipping::empty_sums);
  module.def("sum_outer_products", &clipping::sum_outer_products);
  module.def("reserve_normal",
             [](const std::vector<at::Tensor>& sums, const std::optional<at::Generator>& generator,
                std::int64_t most_threads, std::int64_t threads_of_program) {
               auto [table, programs] =
                   clipping::reserve_normal(sums, generator, most_threads, threads_of_program);
               return std::make_pair(std::move(table), programs);
             });
  module.def("draw_normal", &clipping::draw_normal);
  module.def("add_and_divide", &clipping::add_and_divide);
  module.def("norms_cpu", &clipping::norms_cpu);
  module.def("squared_norms_cpu", &clipping::squared_norms_cpu);
  module.def("layer_norm_gradients_cpu", &clipping::layer_norm_gradients_cpu);
  module.def("embedding_squared_norms_cpu", &clipping::embedding_squared_norms_cpu);
  module.def("linear_gradients_cpu", &clipping::linear_gradients_cpu);
  module.def("weighted_sums_cpu", &clipping::weighted_sums_cpu);
  clipping::add_module_hook(module);
  module.def("hash_of_shapes", &clipping::hash_of_shapes);
}
