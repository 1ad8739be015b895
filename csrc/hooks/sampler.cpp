// SPDX-License-Identifier: Apache-2.0
// Sampler: `f(layer, activations, backprops) -> {parameter: result}`. Its allocations are born as
// `temp_matrices`, and its results get their category on return, because they are known only then.
#include <algorithm>
#include <unordered_map>

#include "allocators/tensor.h"
#include "hooks/arguments.h"
#include "hooks/hooks.h"
#include "hooks/python_tag.h"
#include "python/hook_type.h"

namespace py = pybind11;

namespace opacus_memprof {

namespace {

// The last observed shape of each layer's backprops, by the layer's address.
std::unordered_map<const PyObject*, std::vector<std::int64_t>>& observed_shapes() {
  static auto* const instance = new std::unordered_map<const PyObject*, std::vector<std::int64_t>>;
  return *instance;
}

bool is_new_shape(const PyObject* layer, PyObject* backprops) {
  const auto shape = shape_of(backprops);
  const auto [entry, added] = observed_shapes().try_emplace(layer);
  if (!added && std::ranges::equal(entry->second, shape)) return false;
  entry->second.assign(shape.begin(), shape.end());
  return true;
}

struct Sampler {
  py::function wrapped;
  Tag tag;
  std::uint8_t category;
  OrNone<py::function> observe;

  static constexpr const char* kName = "Sampler";
  static constexpr auto arguments() {
    return std::tuple(&Sampler::wrapped, &Sampler::tag, &Sampler::category, &Sampler::observe);
  }

  [[gnu::hot]] PyObject* call(const Call& call) const {
    auto samples = py::reinterpret_steal<py::object>(pass_under(tag, call, wrapped));
    if (!samples) return nullptr;
    end_sampling();
    retag_results(samples);
    if (!observe.is_none() && call.positional() == 3 && is_new_shape(call.args[0], call.args[2])) {
      observe(py::handle(call.args[0]), py::handle(call.args[2]), samples);
    }
    return samples.release().ptr();
  }

  // A result that is a view of the output's gradient keeps the gradient's category.
  [[gnu::hot]] void retag_results(const py::object& samples) const {
    constexpr std::uint64_t kBornInside = set_of(Category::temp_matrices);
    const auto values = py::reinterpret_steal<py::object>(PyMapping_Values(samples.ptr()));
    if (!values) throw py::error_already_set();
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(values.ptr()); ++i) {
      retag_tensor(PyList_GET_ITEM(values.ptr(), i), category, kKeep16, kBornInside);
    }
  }
};

}  // namespace

void forget_observed_shapes() noexcept { observed_shapes().clear(); }

void add_sampler(py::module_& module) { HookType<Sampler>::add(module); }

}  // namespace opacus_memprof
