// SPDX-License-Identifier: Apache-2.0
// Tagged: runs a callable under a tag.
#include "allocators/tensor.h"
#include "hooks/arguments.h"
#include "hooks/hooks.h"
#include "hooks/python_tag.h"
#include "python/hook_type.h"

namespace py = pybind11;

namespace opacus_memprof {

namespace {

struct Tagged {
  Tag tag;
  py::function wrapped;
  OrNone<py::str> module_of;  // the name of a tensor argument: the module is that of its block

  static constexpr const char* kName = "Tagged";
  static constexpr bool kForwardsAttributes = true;
  static constexpr auto arguments() {
    return std::tuple(&Tagged::tag, &Tagged::wrapped, &Tagged::module_of);
  }

  [[gnu::hot]] PyObject* call(const Call& call) const {
    if (module_of.is_none()) return pass_under(tag, call, wrapped);
    Tag with_module = tag;
    if (PyObject* tensor = argument(call); tensor != nullptr) {
      with_module.module = module_of_tensor(tensor);
    }
    return pass_under(with_module, call, wrapped);
  }

  // Returns the argument that was passed by the name; nullptr if there is none.
  [[nodiscard]] PyObject* argument(const Call& call) const {
    for (Py_ssize_t i = 0; i < call.named(); ++i) {
      if (PyUnicode_Compare(PyTuple_GET_ITEM(call.names, i), module_of.ptr()) == 0) {
        return call.args[call.positional() + i];
      }
    }
    return nullptr;
  }

  [[nodiscard]] py::object doc() const { return wrapped.attr("__doc__"); }
  static std::vector<PyGetSetDef> properties();
  static std::vector<PyType_Slot> slots();
};
using Type = HookType<Tagged>;

// On a class it binds like the function that it wraps.
PyObject* bind(PyObject* self, PyObject* instance, PyObject* /*owner*/) {
  if (instance == nullptr || instance == Py_None) return Py_NewRef(self);
  return PyMethod_New(self, instance);
}

PyObject* repr(PyObject* self) {
  return PyUnicode_FromFormat("<opacus_memprof.Tagged %R>", Type::of(self).wrapped.ptr());
}

std::vector<PyGetSetDef> Tagged::properties() {
  return {Type::property<&Tagged::doc>("__doc__"), Type::property<&Tagged::tag>("tag")};
}

std::vector<PyType_Slot> Tagged::slots() {
  return {Type::slot(Py_tp_descr_get, bind), Type::slot(Py_tp_repr, repr)};
}

}  // namespace

void add_tagged(py::module_& module) { Type::add(module); }

}  // namespace opacus_memprof
