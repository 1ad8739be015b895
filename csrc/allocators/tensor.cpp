// SPDX-License-Identifier: Apache-2.0
#include "allocators/tensor.h"

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "allocators/profiled_allocator.h"
#include "allocators/reporting.h"
#include "core/recorder.h"

namespace opacus_memprof {

namespace {

// nullptr where there is no memory (meta, fake and wrapper tensors) or no tensor.
c10::StorageImpl* storage_of(const at::TensorBase& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// A DTensor's bytes are its local tensor's, which it holds.
c10::StorageImpl* storage_of(PyObject* object) {
  if (!THPVariable_Check(object)) return nullptr;
  c10::StorageImpl* storage = storage_of(THPVariable_Unpack(object));
  if (THPVariable_CheckExact(object) || (storage != nullptr && storage->data() != nullptr)) {
    return storage;
  }
  PyObject* local = PyObject_GetAttrString(object, "_local_tensor");
  if (local == nullptr) {
    PyErr_Clear();
    return storage;
  }
  storage = THPVariable_Check(local) ? storage_of(THPVariable_Unpack(local)) : nullptr;
  Py_DECREF(local);
  return storage;
}

// What a capture remembers of a storage: enough to ask later who else holds it, without holding it.
struct Captured {
  BlockId block;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
};

// One module's captures, the newest last. Keeps its room: a step captures as many as the last one.
class Captures {
 public:
  void begin() { begins_.push_back(blocks_.size()); }
  void add(Captured block) { blocks_.push_back(std::move(block)); }
  void drop_newest() {
    blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(begins_.back()), blocks_.end());
    begins_.pop_back();
  }

  [[nodiscard]] std::size_t size() const noexcept { return begins_.size(); }
  std::span<Captured> newest() { return std::span(blocks_).subspan(begins_.back()); }
  std::span<Captured> all() { return blocks_; }

 private:
  std::vector<Captured> blocks_;
  std::vector<std::size_t> begins_;
};

std::size_t outstanding = 0;  // captures, of all modules

// By module's id.
std::vector<Captures>& captures() {
  static auto* const instance = new std::vector<Captures>;
  return *instance;
}

[[gnu::hot]] std::uint64_t retag_storage(c10::StorageImpl* storage, std::uint8_t category,
                                         std::uint16_t module, std::uint64_t expected) {
  if (storage == nullptr) return 0;
  c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
  if (ProfiledAllocator* allocator = allocator_of(data.device().type()); allocator != nullptr) {
    allocator->adopt(data, storage->nbytes());
  }
  return recorder().retag(address_of(data.get()), category, module, expected);
}

// gcc drops calls of functions that do nothing but prefetch, so this one must be inlined.
[[gnu::always_inline]] inline void prefetch_block(const c10::StorageImpl* storage) noexcept {
  if (storage == nullptr) return;
  __builtin_prefetch(recorder().place(address_of(storage->data())), 1);
}

// Storages, one for each tensor that nobody but the program holds.
using OfProgram = std::vector<const c10::StorageImpl*>;

// torch keeps a Python object with what somebody has once looked at: nobody holds that one.
template <typename T>
std::int64_t idle_wrappers(const T& impl) {
  const PyObject* wrapper = impl.pyobj_slot()->load_pyobj();
  return wrapper != nullptr && Py_REFCNT(wrapper) == 1 ? 1 : 0;
}

bool held_once(const at::TensorBase& tensor) {
  const auto holders = static_cast<std::int64_t>(tensor.use_count());
  return holders - idle_wrappers(*tensor.unsafeGetTensorImpl()) <= 1;
}

// Who holds the storage, besides the program.
std::int64_t holders(const c10::weak_intrusive_ptr<c10::StorageImpl>& reference,
                     const OfProgram& of_program) {
  const auto storage = reference.lock();
  if (!storage) return 0;
  return static_cast<std::int64_t>(storage.use_count()) - 1 - idle_wrappers(*storage) -
         std::ranges::count(of_program, storage.get());
}

[[gnu::hot]] void settle(Captures& of_module, const OfProgram& of_program = {}) {
  for (const Captured& captured : of_module.all()) {
    recorder().settle(captured.block, holders(captured.storage, of_program));
  }
}

}  // namespace

[[gnu::hot]] std::uint64_t retag_tensor(PyObject* tensor, std::uint8_t category,
                                        std::uint16_t module, std::uint64_t expected) {
  return retag_storage(storage_of(tensor), category, module, expected);
}

[[gnu::hot]] void prefetch_block_of(PyObject* tensor) noexcept {
  if (THPVariable_Check(tensor)) prefetch_block(storage_of(THPVariable_Unpack(tensor)));
}

[[gnu::hot]] void prefetch_block_of_gradient(PyObject* parameter) noexcept {
  if (!THPVariable_Check(parameter)) return;
  prefetch_block(storage_of(THPVariable_Unpack(parameter).grad()));
}

[[gnu::hot]] std::uint64_t retag_gradient(PyObject* parameter, std::uint8_t category,
                                          std::uint16_t module) {
  if (!THPVariable_Check(parameter)) return 0;
  const at::Tensor& gradient = THPVariable_Unpack(parameter).grad();
  if (!gradient.defined()) return 0;
  if (c10::StorageImpl* storage = storage_of(gradient);
      storage != nullptr && storage->data() != nullptr) {
    return retag_storage(storage, category, module, Recorder::kAnyCategory);
  }
  PyObject* object = THPVariable_Wrap(gradient);  // a DTensor
  const std::uint64_t bytes = retag_tensor(object, category, module, Recorder::kAnyCategory);
  Py_XDECREF(object);
  return bytes;
}

[[gnu::hot]] void retag_tensor(const at::Tensor& tensor, std::uint8_t category,
                               std::uint16_t module) {
  retag_storage(storage_of(tensor), category, module, Recorder::kAnyCategory);
}

std::uint16_t module_of_tensor(PyObject* tensor) {
  c10::StorageImpl* storage = storage_of(tensor);
  if (storage == nullptr) return 0;
  return recorder().module_of(address_of(storage->_mutable_data_ptr_no_checks().get()));
}

bool held_by_program_alone(const at::Tensor& tensor) {
  const c10::StorageImpl* impl = storage_of(tensor);
  if (impl == nullptr) return false;
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  const auto holders = static_cast<std::int64_t>(storage.use_count()) - idle_wrappers(*impl);
  return holders == (tensor.is_view() ? 2 : 1);
}

std::span<const std::int64_t> shape_of(PyObject* tensor) {
  if (!THPVariable_Check(tensor)) return {};
  return THPVariable_Unpack(tensor).sizes();
}

[[gnu::hot]] void capture_tensors(std::uint16_t module, std::span<PyObject* const> tensors) {
  if (module >= captures().size()) captures().resize(module + std::size_t{1});
  Captures& of_module = captures()[module];
  of_module.begin();
  ++outstanding;
  for (PyObject* tensor : tensors) {
    c10::StorageImpl* storage = storage_of(tensor);
    if (storage == nullptr) continue;
    const BlockId block =
        recorder().capture(address_of(storage->_mutable_data_ptr_no_checks().get()));
    if (block.serial == 0) continue;
    of_module.add({.block = block,
                   .storage = c10::weak_intrusive_ptr<c10::StorageImpl>(
                       c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage))});
  }
}

[[gnu::hot]] void release_captures(std::uint16_t module) {
  if (module >= captures().size() || captures()[module].size() == 0) return;
  for (const Captured& captured : captures()[module].newest()) recorder().release(captured.block);
  captures()[module].drop_newest();
  --outstanding;
}

[[gnu::hot]] void settle_captures(std::uint16_t module) {
  if (module < captures().size()) settle(captures()[module]);
}

[[gnu::hot]] void settle_all_captures(std::span<PyObject* const> outputs) {
  OfProgram of_program;
  for (PyObject* output : outputs) {
    if (!THPVariable_Check(output)) continue;
    const at::Tensor& tensor = THPVariable_Unpack(output);
    // Had autograd saved the tensor, it would hold the very same one. A view, as everything is that
    // leaves a module with a backward hook, keeps what it is of.
    if (!held_once(tensor)) continue;
    of_program.push_back(storage_of(tensor));
    if (tensor.is_view() && held_once(tensor._base())) {
      of_program.push_back(storage_of(tensor._base()));
    }
  }
  if (outstanding == 0) return;
  for (Captures& of_module : captures()) settle(of_module, of_program);
}

std::vector<std::pair<std::uint16_t, std::size_t>> outstanding_captures() {
  std::vector<std::pair<std::uint16_t, std::size_t>> result;
  if (outstanding == 0) return result;
  for (std::size_t module = 0; module < captures().size(); ++module) {
    const std::size_t count = captures()[module].size();
    if (count > 0) result.emplace_back(static_cast<std::uint16_t>(module), count);
  }
  return result;
}

}  // namespace opacus_memprof
