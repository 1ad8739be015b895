// SPDX-License-Identifier: Apache-2.0
#include "clipping/module_hook.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "clipping/gradient_tap.h"
#include "clipping/hashing.h"
#include "python/hook_type.h"

namespace opacus_memprof::clipping {

namespace {

using pybind11::handle;
using pybind11::object;

// The name of an attribute, made once.
class Name {
 public:
  explicit Name(const char* name) : name_(PyUnicode_InternFromString(name)) {}

  [[nodiscard]] object of(handle owner) const {
    PyObject* value = PyObject_GetAttr(owner.ptr(), name_);
    if (value == nullptr) throw pybind11::error_already_set();
    return pybind11::reinterpret_steal<object>(value);
  }
  [[nodiscard]] bool is_true(handle owner) const {
    const int truth = PyObject_IsTrue(of(owner).ptr());
    if (truth < 0) throw pybind11::error_already_set();
    return truth != 0;
  }
  [[nodiscard]] std::int64_t number(handle owner) const { return of(owner).cast<std::int64_t>(); }
  void set(handle owner, handle value) const {
    if (PyObject_SetAttr(owner.ptr(), name_, value.ptr()) != 0) throw pybind11::error_already_set();
  }
  [[nodiscard]] PyObject* ptr() const { return name_; }

 private:
  PyObject* name_;
};

// Attributes of FlashClipHooks, LayerHooks, Call, PlainLayer, Running, Layer and nn.Module.
struct Names {
  Name call{"_call"};
  Name hooks_enabled{"hooks_enabled"};
  Name layer_hooks{"layer_hooks"};
  Name registry{"registry"};
  Name model{"model"};
  Name training{"training"};
  Name batch{"batch"};
  Name bookkeeping{"bookkeeping"};
  Name for_compiled_autograd{"for_compiled_autograd"};
  Name forward{"forward"};
  Name is_off{"is_off"};
  Name is_probing{"is_probing"};
  Name is_repeating{"is_repeating"};
  Name kept_bytes{"kept_bytes"};
  Name observe{"observe"};
  Name plain{"plain"};
  Name receive{"receive"};
  Name trace{"trace"};
  Name cannot_run{"cannot_run"};
  Name entry{"entry"};
  Name layer{"layer"};
  Name least_dimensions{"least_dimensions"};
  Name running{"running"};
  Name frozen{"frozen"};
  Name shapes{"shapes"};
  Name excluded{"excluded"};
  Name module{"module"};
  Name running_module{"running_module"};
  Name running_parameters{"running_parameters"};
  Name thread{"thread"};
  Name parameters{"_parameters"};
  Name requires_grad{"requires_grad"};
  Name weight{"weight"};
};

const Names& names() {
  static const Names* const all = new Names();  // outlives Python
  return *all;
}

// Returns a dictionary's value; a null handle if the key is missing.
handle item(handle dictionary, handle key) {
  PyObject* value = PyDict_GetItemWithError(dictionary.ptr(), key.ptr());
  if (value == nullptr && PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
  return value;
}

bool is_tensor(handle value) { return THPVariable_Check(value.ptr()); }

const at::Tensor& tensor_of(handle value) { return THPVariable_Unpack(value.ptr()); }

bool is_any_autocast_enabled() {
  return std::ranges::any_of(at::autocast::_AUTOCAST_SUPPORTED_DEVICES, [](at::DeviceType each) {
    return at::autocast::is_autocast_enabled(each);
  });
}

// Whether the current thread has called the model. Of another one, Call.is_elsewhere says what to
// do.
bool is_here(handle call) {
  return names().thread.of(call).cast<unsigned long>() == PyThread_get_thread_ident();
}

bool is_repeating(handle hooks) { return names().is_repeating.of(hooks)().cast<bool>(); }

// FlashClipHooks._active, except for a probe, whose calls Python follows.
bool is_followed(handle owner, handle hooks) {
  const object call = names().call.of(owner);
  if (!names().hooks_enabled.is_true(owner) || names().is_off.is_true(hooks) || is_repeating(hooks))
    return false;
  if (names().is_probing.is_true(hooks) || !names().observe.of(hooks).is_none()) return false;
  if (call.is_none()) return names().training.is_true(names().model.of(names().registry.of(owner)));
  return !names().is_off.is_true(call) && names().cannot_run.of(call).is_none() && is_here(call);
}

bool is_trained(handle layer, handle name, handle parameter) {
  if (parameter.is_none() || !tensor_of(parameter).requires_grad()) return false;
  const int is_excluded = PySet_Contains(names().excluded.of(layer).ptr(), name.ptr());
  if (is_excluded < 0) throw pybind11::error_already_set();
  return is_excluded == 0;
}

// Layer.running_parameters
object parameters_to_freeze(handle layer) {
  const object module = names().module.of(layer);
  if (!module.is(names().running_module.of(layer))) return names().running_parameters.of(layer)();
  pybind11::list found;
  for (const auto& [name, parameter] : names().parameters.of(module).cast<pybind11::dict>()) {
    if (is_trained(layer, name, parameter)) found.append(parameter);
  }
  return found;
}

void set_requires_grad(handle parameters, bool requires_grad) {
  for (const handle parameter : parameters.cast<pybind11::list>())
    names().requires_grad.set(parameter, pybind11::bool_(requires_grad));
}

// What a hook is called with: the module, its arguments and, after its forward, the output.
struct Arguments {
  handle module, args, kwargs, output;

  // The module's only input; a null handle if it has others, or keywords.
  [[nodiscard]] handle input() const {
    const bool is_single = PyTuple_GET_SIZE(args.ptr()) == 1 && PyDict_GET_SIZE(kwargs.ptr()) == 0;
    const handle first = is_single ? PyTuple_GET_ITEM(args.ptr(), 0) : nullptr;
    return first && is_tensor(first) ? first : handle();
  }
};

// Each returns the hook's result, or nothing if Python has to find it.
using Answer = std::optional<object>;

Answer at_entry(handle owner, const Arguments& of) {
  const object call = names().call.of(owner);
  if (call.is_none() || names().entry.of(call).is(of.module)) return std::nullopt;
  return pybind11::none();
}

Answer before_layer(handle owner, const Arguments& of) {
  const object hooks = names().layer_hooks.of(owner);
  const handle plain = item(names().plain.of(hooks), of.module);
  const handle x = of.input();
  if (!plain || !x || !is_followed(owner, hooks) || is_any_autocast_enabled()) return std::nullopt;
  if (tensor_of(x).dim() < names().least_dimensions.number(plain)) return std::nullopt;
  const object layer = names().layer.of(plain);
  const object running = names().running.of(plain);
  const object frozen = parameters_to_freeze(layer);
  set_requires_grad(frozen, false);
  names().frozen.set(running, frozen);
  if (PyDict_SetItem(names().running.of(hooks).ptr(), layer.ptr(), running.ptr()) != 0)
    throw pybind11::error_already_set();
  return pybind11::none();
}

Answer after_layer(handle owner, const Arguments& of) {
  const object call = names().call.of(owner);
  if (!call.is_none() && !is_here(call)) return std::nullopt;
  const object hooks = names().layer_hooks.of(owner);
  const handle plain = item(names().plain.of(hooks), of.module);
  const handle x = of.input();
  if (!plain || !x || !is_tensor(of.output)) return std::nullopt;
  const object layer = names().layer.of(plain);
  const object running = names().running.of(plain);
  const object all_running = names().running.of(hooks);
  if (!item(all_running, layer).is(running))
    return std::nullopt;  // `before_layer` has not begun it
  const at::Tensor& input = tensor_of(x);
  const at::Tensor& output = tensor_of(of.output);
  const std::int64_t batch = names().batch.number(hooks);
  if (output.is_nested() || output.dim() == 0 || output.size(0) != batch) return std::nullopt;
  const bool is_graph_built = at::GradMode::is_enabled();
  if (is_graph_built) {
    if (!output.requires_grad() || names().for_compiled_autograd.is_true(hooks))
      return std::nullopt;
    if (output.is_cuda()) {
      const object shapes = pybind11::int_(hash_of_shapes(input, output));
      if (!shapes.equal(names().shapes.of(running))) return std::nullopt;
      names().kept_bytes.set(hooks, names().kept_bytes.of(hooks) + names().kept_bytes.of(running));
    }
  }
  set_requires_grad(names().frozen.of(running), true);
  if (PyDict_DelItem(all_running.ptr(), layer.ptr()) != 0) throw pybind11::error_already_set();
  if (PyList_Append(names().trace.of(hooks).ptr(), layer.ptr()) != 0)
    throw pybind11::error_already_set();
  if (!is_graph_built) return pybind11::none();
  const handle weight = item(names().parameters.of(names().module.of(layer)), names().weight.ptr());
  const bool needs_input = weight && is_trained(layer, names().weight.ptr(), weight);
  const at::Tensor tapped =
      tap_gradient(output, std::nullopt, needs_input ? std::optional(input) : std::nullopt,
                   names().receive.of(hooks),
                   pybind11::make_tuple(layer, names().bookkeeping.of(hooks), pybind11::none(),
                                        batch, names().forward.of(hooks)));
  return pybind11::reinterpret_steal<object>(THPVariable_Wrap(tapped));
}

using Function = Answer (*)(handle, const Arguments&);

Function function_of(std::string_view method) {
  if (method == "_before_layer") return before_layer;
  if (method == "_after_layer") return after_layer;
  if (method == "_before_entry" || method == "_after_entry") return at_entry;
  return nullptr;
}

struct ModuleHook {
  pybind11::object wrapped;  // a bound method; a copied or loaded model has hooks of its own owner
  Function function = nullptr;

  static constexpr const char* kName = "ModuleHook";
  static constexpr auto arguments() { return std::tuple(&ModuleHook::wrapped); }

  void prepare() {
    const auto name = wrapped.attr("__name__").cast<std::string>();
    if (PyMethod_Check(wrapped.ptr())) function = function_of(name);
    if (function == nullptr) throw std::runtime_error("this method has no ModuleHook");
  }

  // Errors of torch become the exceptions that torch makes of them, as in its own bindings.
  PyObject* call(const Call& call) const {
    HANDLE_TH_ERRORS
    const Py_ssize_t count = call.positional();
    if (call.names == nullptr && (count == 3 || count == 4)) {
      const Answer answer =
          function(PyMethod_GET_SELF(wrapped.ptr()),
                   {call.args[0], call.args[1], call.args[2], count == 4 ? call.args[3] : Py_None});
      if (answer) return answer->inc_ref().ptr();
    }
    return call.pass_to(wrapped);
    END_HANDLE_TH_ERRORS
  }
};

}  // namespace

std::uint64_t hash_of_shapes(const at::Tensor& input, const at::Tensor& output) {
  std::uint64_t hash = 0;
  for (const at::Tensor* each : {&input, &output}) {
    hash = mix(mix(hash, static_cast<std::uint64_t>(each->scalar_type())), each->sizes().size());
    for (const std::int64_t size : each->sizes())
      hash = mix(hash, static_cast<std::uint64_t>(size));
  }
  return hash;
}

void add_module_hook(pybind11::module_& module) { HookType<ModuleHook>::add(module); }

}  // namespace opacus_memprof::clipping
