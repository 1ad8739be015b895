// SPDX-License-Identifier: Apache-2.0
// CaptureBackprops: Opacus' full backward hook. It runs after the module's own backward, when
// autograd has released its saved tensors. Allocations of the hook get one tag until its sampler
// has returned, and another one afterwards.
#include "core/tag_stack.h"
#include "hooks/arguments.h"
#include "hooks/attributes.h"
#include "hooks/captures.h"
#include "hooks/hooks.h"
#include "python/hook_type.h"

namespace py = pybind11;

namespace opacus_memprof {

namespace {

// The tag that the CaptureBackprops on this thread uses after its sampler; nullptr if none runs.
thread_local const Tag* tag_after_sampling = nullptr;

class SamplingScope {
 public:
  SamplingScope(const Tag& before, const Tag& after) : scope_(before), outer_(tag_after_sampling) {
    tag_after_sampling = &after;
  }
  SamplingScope(const SamplingScope&) = delete;
  SamplingScope& operator=(const SamplingScope&) = delete;
  ~SamplingScope() { tag_after_sampling = outer_; }

 private:
  TagScope scope_;
  const Tag* outer_;
};

struct CaptureBackprops {
  py::function wrapped;
  std::uint16_t module;
  Tag before;  // the sampler's return changes the tag
  Tag after;

  static constexpr const char* kName = "CaptureBackprops";
  static constexpr auto arguments() {
    using Hook = CaptureBackprops;
    return std::tuple(&Hook::wrapped, &Hook::module, &Hook::before, &Hook::after);
  }

  [[gnu::hot]] PyObject* call(const Call& call) const {
    const Py_ssize_t captures = call.positional() == 0 ? 0 : captures_on(call.args[0]);
    // Nothing was captured, or this is ghost clipping's second pass.
    if (captures == 0) return call.pass_to(wrapped);
    settle_captures(module);
    PyObject* result = pass_under_tags(call);
    const py::error_scope raised;  // raised by the hook, if any
    if (captures_on(call.args[0]) < captures) release_captures(module);
    return result;
  }

  [[gnu::hot]] PyObject* pass_under_tags(const Call& call) const {
    const SamplingScope scope(before, after);
    return call.pass_to(wrapped);
  }

  [[nodiscard]] py::object reduce(py::handle protocol) const {
    return reduce_to(wrapped, protocol);
  }
};

}  // namespace

void end_sampling() noexcept {
  if (tag_after_sampling != nullptr) this_thread().change(*tag_after_sampling);
}

void add_capture_backprops(py::module_& module) { HookType<CaptureBackprops>::add(module); }

}  // namespace opacus_memprof
