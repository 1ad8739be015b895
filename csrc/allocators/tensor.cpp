// SPDX-License-Identifier: Apache-2.0
#include "allocators/tensor.h"

#include "allocators/profiled_allocator.h"
#include "allocators/reporting.h"
#include "allocators/storage.h"
#include "core/recorder.h"

namespace opacus_memprof {

namespace {

[[gnu::hot]] std::uint64_t retag_storage(c10::StorageImpl* storage, std::uint8_t category,
                                         std::uint16_t module, std::uint64_t expected) {
  if (storage == nullptr) return 0;
  c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
  ProfiledAllocator* allocator = allocator_of(data.device().type());
  if (allocator != nullptr) allocator->adopt(data, storage->nbytes());
  const std::uint64_t changed =
      recorder().retag(address_of(data.get()), category, module, expected);
  if (changed != 0 && allocator != nullptr) allocator->annotate(data.get(), category, module);
  return changed;
}

// gcc drops calls of functions that only prefetch, so this one must be inlined.
[[gnu::always_inline]] inline void prefetch_block(const c10::StorageImpl* storage) noexcept {
  if (storage == nullptr) return;
  __builtin_prefetch(recorder().prefetch_address(address_of(storage->data())), 1);
}

}  // namespace

c10::StorageImpl* storage_of_local_tensor(PyObject* object, c10::StorageImpl* own_storage) {
  PyObject* local = PyObject_GetAttrString(object, "_local_tensor");
  if (local == nullptr) {
    PyErr_Clear();
    return own_storage;
  }
  c10::StorageImpl* storage =
      THPVariable_Check(local) ? storage_of(THPVariable_Unpack(local)) : nullptr;
  Py_DECREF(local);  // the DTensor still holds it
  return storage;
}

[[gnu::hot]] std::uint64_t retag_tensor(PyObject* tensor, std::uint8_t category,
                                        std::uint16_t module, std::uint64_t expected) {
  return retag_storage(storage_of(tensor), category, module, expected);
}

[[gnu::hot]] void retag_tensor(const at::Tensor& tensor, std::uint8_t category,
                               std::uint16_t module) {
  retag_storage(storage_of(tensor), category, module, Recorder::kAnyCategory);
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

[[gnu::hot]] void prefetch_block_of(PyObject* tensor) {
  if (THPVariable_Check(tensor)) prefetch_block(storage_of(THPVariable_Unpack(tensor)));
}

[[gnu::hot]] void prefetch_block_of_gradient(PyObject* parameter) {
  if (!THPVariable_Check(parameter)) return;
  prefetch_block(storage_of(THPVariable_Unpack(parameter).grad()));
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
  const auto holders =
      static_cast<std::int64_t>(storage.use_count()) - unreferenced_wrappers(*impl);
  return holders == (tensor.is_view() ? 2 : 1);
}

std::span<const std::int64_t> shape_of(PyObject* tensor) {
  if (!THPVariable_Check(tensor)) return {};
  return THPVariable_Unpack(tensor).sizes();
}

}  // namespace opacus_memprof
