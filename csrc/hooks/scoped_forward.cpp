// SPDX-License-Identifier: Apache-2.0
// ScopedForward: a module's `forward` under the module's tag.
//
// It is in the module's __dict__ and so must not own the module: a cycle would keep the model's
// memory until a garbage collection. It holds the class' function and a weak reference instead. (A
// forward hook would take several times as long: with one hook every call of the module uses
// torch's slow path.)
#include <algorithm>
#include <array>

#include "allocators/backward_position.h"
#include "hooks/arguments.h"
#include "hooks/hooks.h"
#include "python/hook_type.h"

namespace py = pybind11;

namespace opacus_memprof {

namespace {

struct ScopedForward {
  py::function function;  // the class' own, unbound; or the callable that was in the __dict__
  py::weakref reference;  // to the module
  std::uint16_t module;
  bool bound_by_class;

  static constexpr const char* kName = "ScopedForward";
  static constexpr bool kForwardsAttributes = true;
  static constexpr auto arguments() {
    using Hook = ScopedForward;
    return std::tuple(&Hook::function, &Hook::reference, &Hook::module, &Hook::bound_by_class);
  }

  [[gnu::hot]] PyObject* call(const Call& call) const {
    ModuleScope scope(module);
    PyObject* result = bound_by_class ? call_bound(call) : call.pass_to(function);
    if (result == nullptr) scope.fail();
    return result;
  }

  [[gnu::hot]] PyObject* call_bound(const Call& call) const {
    const py::object self = referenced_module();
    const auto count = static_cast<std::size_t>(call.positional() + call.named());
    std::array<PyObject*, 8> few;
    std::vector<PyObject*> many;
    PyObject** all = few.data();
    if (count + 1 > few.size()) {
      many.resize(count + 1);
      all = many.data();
    }
    all[0] = self.ptr();
    std::copy_n(call.args, count, all + 1);
    const auto positional = static_cast<std::size_t>(call.positional());
    return PyObject_Vectorcall(function.ptr(), all, positional + 1, call.names);
  }

  [[nodiscard]] py::object referenced_module() const {
    PyObject* found = nullptr;
#if PY_VERSION_HEX >= 0x030D0000
    PyWeakref_GetRef(reference.ptr(), &found);
#else
    found = PyWeakref_GetObject(reference.ptr());
    found = found == Py_None ? nullptr : Py_XNewRef(found);
#endif
    if (found == nullptr && PyErr_Occurred() == nullptr) {
      PyErr_SetString(PyExc_ReferenceError, "the module of this forward is gone");
    }
    if (found == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(found);
  }

  // The wrapped forward as a bound method, for inspect.signature and other code that unwraps.
  [[nodiscard]] py::object wrapped_callable() const {
    if (!bound_by_class) return function;
    return py::reinterpret_steal<py::object>(
        PyMethod_New(function.ptr(), referenced_module().ptr()));
  }

  // A pickle or deep copy of a model has its plain forward: copies are not profiled.
  [[nodiscard]] py::object reduce(py::handle protocol) const {
    if (!bound_by_class) return reduce_to(function, protocol);
    const py::object getattr = py::module_::import("builtins").attr("getattr");
    return py::make_tuple(getattr, py::make_tuple(referenced_module(), "forward"));
  }

  static std::vector<PyGetSetDef> properties() {
    return {HookType<ScopedForward>::property<&ScopedForward::bound_by_class>("bound_by_class")};
  }
};

}  // namespace

void add_scoped_forward(py::module_& module) { HookType<ScopedForward>::add(module); }

}  // namespace opacus_memprof
