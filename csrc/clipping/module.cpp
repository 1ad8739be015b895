// SPDX-License-Identifier: Apache-2.0
// The Python face of what flash_clip does for each layer; definitions only.
#include <torch/csrc/utils/pybind.h>

#include "clipping/gradient_tap.h"
#include "clipping/step.h"

namespace clipping = opacus_memprof::clipping;

PYBIND11_MODULE(_clipping, module) {
  module.def("tap_gradient", &clipping::tap_gradient);
  module.def("group_alike", &clipping::group_alike);
  module.def("address_table", &clipping::address_table);
  module.def("empty_sums", &clipping::empty_sums);
  module.def("sum_outer_products", &clipping::sum_outer_products);
  module.def("draw_normal", &clipping::draw_normal);
}
