// SPDX-License-Identifier: Apache-2.0
#include "adaptors/tensor.h"

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/python_variable.h>

#include <unordered_map>

#include "adaptors/adaptor.h"
#include "adaptors/reporting.h"
#include "core/recorder.h"

namespace opacus_memprof {

namespace {

// nullptr where there is no memory (meta, fake and wrapper tensors) or no tensor.
c10::StorageImpl* storage_of(const at::Tensor& tensor) {
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

Adaptor* adaptor_of(c10::DeviceType type) {
  if (type == c10::DeviceType::CPU) return &cpu_adaptor();
  return type == c10::DeviceType::CUDA ? cuda_adaptor() : nullptr;
}

// What a capture remembers of a storage: enough to ask later who else holds it, without holding it.
struct Captured {
  BlockId block;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
};
using Capture = std::vector<Captured>;

std::unordered_map<std::uint16_t, std::vector<Capture>>& captures() {
  static auto* const instance = new std::unordered_map<std::uint16_t, std::vector<Capture>>;
  return *instance;
}

std::uint64_t retag_storage(c10::StorageImpl* storage, std::uint8_t category, std::uint16_t module,
                            std::uint64_t expected) {
  if (storage == nullptr) return 0;
  c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
  if (Adaptor* adaptor = adaptor_of(data.device().type()); adaptor != nullptr) {
    adaptor->adopt(data, storage->nbytes());
  }
  return recorder().retag(address_of(data.get()), category, module, expected);
}

// Who holds the storage, besides the Python object that torch keeps with it once somebody looked:
// nobody holds that one.
std::int64_t holders(const c10::weak_intrusive_ptr<c10::StorageImpl>& reference) {
  const auto storage = reference.lock();
  if (!storage) return 0;
  const PyObject* wrapper = storage->pyobj_slot()->load_pyobj();
  const bool idle_wrapper = wrapper != nullptr && Py_REFCNT(wrapper) == 1;
  return static_cast<std::int64_t>(storage.use_count()) - 1 - (idle_wrapper ? 1 : 0);
}

void settle(const Capture& capture) {
  for (const Captured& captured : capture) {
    recorder().settle(captured.block, holders(captured.storage));
  }
}

}  // namespace

std::uint64_t retag_tensor(PyObject* tensor, std::uint8_t category, std::uint16_t module,
                           std::uint64_t expected) {
  return retag_storage(storage_of(tensor), category, module, expected);
}

void retag_tensor(const at::Tensor& tensor, std::uint8_t category, std::uint16_t module) {
  retag_storage(storage_of(tensor), category, module, Recorder::kAnyCategory);
}

void capture_tensors(std::uint16_t module, std::span<PyObject* const> tensors) {
  Capture capture;
  capture.reserve(tensors.size());
  for (PyObject* tensor : tensors) {
    c10::StorageImpl* storage = storage_of(tensor);
    if (storage == nullptr) continue;
    const BlockId block =
        recorder().capture(address_of(storage->_mutable_data_ptr_no_checks().get()));
    if (block.serial == 0) continue;
    capture.push_back({.block = block,
                       .storage = c10::weak_intrusive_ptr<c10::StorageImpl>(
                           c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage))});
  }
  captures()[module].push_back(std::move(capture));
}

void release_captures(std::uint16_t module) {
  const auto found = captures().find(module);
  if (found == captures().end() || found->second.empty()) return;
  for (const Captured& captured : found->second.back()) recorder().release(captured.block);
  found->second.pop_back();
}

void settle_captures(std::uint16_t module) {
  const auto found = captures().find(module);
  if (found == captures().end()) return;
  for (const Capture& capture : found->second) settle(capture);
}

void settle_all_captures() {
  for (const auto& [module, stack] : captures()) {
    for (const Capture& capture : stack) settle(capture);
  }
}

std::vector<std::pair<std::uint16_t, std::size_t>> outstanding_captures() {
  std::vector<std::pair<std::uint16_t, std::size_t>> result;
  for (const auto& [module, stack] : captures()) {
    if (!stack.empty()) result.emplace_back(module, stack.size());
  }
  return result;
}

}  // namespace opacus_memprof
