// SPDX-License-Identifier: Apache-2.0
// Sampler: `f(layer, activations, backprops) -> {parameter: result}`. What it allocates is born as
// `temp_matrices`, and what it returns gets its category on return: only then is it known which
// blocks those are.
#include <algorithm>
#include <unordered_map>
#include <vector>

#include "adaptors/tensor.h"
#include "bindings/callable.h"
#include "core/vocabulary.h"

namespace opacus_memprof {

namespace {

struct Sampler {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* wrapped;
  PyObject* observe;  // or None
  PyObject* tag_object;
  Tag tag;
  std::uint8_t category;
};
using Slots = Collected<Sampler, &Sampler::wrapped, &Sampler::observe, &Sampler::tag_object>;

PyTypeObject* sampler_type = nullptr;

// A result that is a view of the output's gradient keeps the gradient's category. False with a
// Python error set.
[[gnu::hot]] bool retag_results(const Sampler* sampler, PyObject* samples) {
  constexpr std::uint64_t kBornInside = set_of(Category::temp_matrices);
  PyObject* values = PyMapping_Values(samples);
  if (values == nullptr) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(values); ++i) {
    retag_tensor(PyList_GET_ITEM(values, i), sampler->category, kKeep16, kBornInside);
  }
  Py_DECREF(values);
  return true;
}

// What each layer's backprops were like when they were last looked at, by the layer's address.
std::unordered_map<const PyObject*, std::vector<std::int64_t>>& looked_at() {
  static auto* const instance = new std::unordered_map<const PyObject*, std::vector<std::int64_t>>;
  return *instance;
}

bool is_new(const PyObject* layer, PyObject* backprops) {
  const auto shape = shape_of(backprops);
  const auto [entry, added] = looked_at().try_emplace(layer);
  if (!added && std::ranges::equal(entry->second, shape)) return false;
  entry->second.assign(shape.begin(), shape.end());
  return true;
}

bool let_observe(const Sampler* sampler, PyObject* layer, PyObject* backprops, PyObject* samples) {
  if (!is_new(layer, backprops)) return true;
  PyObject* looked =
      PyObject_CallFunctionObjArgs(sampler->observe, layer, backprops, samples, nullptr);
  Py_XDECREF(looked);
  return looked != nullptr;
}

[[gnu::hot]] PyObject* call(PyObject* self, PyObject* const* args, std::size_t flags,
                            PyObject* names) {
  auto* sampler = as<Sampler>(self);
  PyObject* samples = call_under(sampler->tag, sampler->wrapped, args, flags, names);
  if (samples == nullptr) return nullptr;
  sampled();
  const bool look = sampler->observe != Py_None && PyVectorcall_NARGS(flags) == 3;
  if (!retag_results(sampler, samples) ||
      (look && !let_observe(sampler, args[0], args[2], samples))) {
    Py_CLEAR(samples);
  }
  return samples;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject* /*kwargs*/) {
  PyObject* wrapped = nullptr;
  PyObject* tag_object = nullptr;
  PyObject* observe = nullptr;
  std::uint8_t category = 0;
  Tag tag;
  if (!PyArg_ParseTuple(args, "O&OO&O", to_callable, &wrapped, &tag_object, to_category, &category,
                        &observe) ||
      to_tag(tag_object, &tag) == 0) {
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  auto* sampler = as<Sampler>(self);
  sampler->vectorcall = call;
  sampler->wrapped = Py_NewRef(wrapped);
  sampler->observe = Py_NewRef(observe);
  sampler->tag_object = Py_NewRef(tag_object);
  sampler->tag = tag;
  sampler->category = category;
  return self;
}

PyObject* reduce(PyObject* self, PyObject* /*unused*/) {
  auto* sampler = as<Sampler>(self);
  return Py_BuildValue("O(OOiO)", sampler_type, sampler->wrapped, sampler->tag_object,
                       static_cast<int>(sampler->category), sampler->observe);
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Sampler, vectorcall), READONLY, nullptr},
    {"__wrapped__", T_OBJECT, offsetof(Sampler, wrapped), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyMethodDef methods[] = {
    {"__reduce__", reduce, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("A grad sampler or norm sampler, and what it returns.")},
    slot(Py_tp_new, make),
    slot(Py_tp_dealloc, Slots::dealloc),
    slot(Py_tp_traverse, Slots::traverse),
    slot(Py_tp_clear, Slots::clear),
    slot(Py_tp_call, PyVectorcall_Call),
    {Py_tp_members, members},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec spec = {"opacus_memprof._C.Sampler", sizeof(Sampler), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};

}  // namespace

void look_again() noexcept { looked_at().clear(); }

bool add_sampler(PyObject* module) { return add_type(module, spec, &sampler_type); }

}  // namespace opacus_memprof
