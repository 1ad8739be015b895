// SPDX-License-Identifier: Apache-2.0
// The storage under a tensor, and the number of its holders. Inline, because retagging needs it for
// every tensor.
#pragma once

#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>

namespace opacus_memprof {

// nullptr if there is no memory (meta, fake and wrapper tensors).
inline c10::StorageImpl* storage_of(const at::TensorBase& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// Returns the storage of `_local_tensor`, which holds the bytes of a DTensor; `own_storage` if the
// object has no such attribute.
c10::StorageImpl* storage_of_local_tensor(PyObject* object, c10::StorageImpl* own_storage);

// nullptr also if the object is not a tensor.
inline c10::StorageImpl* storage_of(PyObject* object) {
  if (!THPVariable_Check(object)) return nullptr;
  c10::StorageImpl* storage = storage_of(THPVariable_Unpack(object));
  if (THPVariable_CheckExact(object) || (storage != nullptr && storage->data() != nullptr)) {
    return storage;
  }
  return storage_of_local_tensor(object, storage);
}

// Returns 1 if the use count of the tensor or storage includes a Python wrapper without references,
// otherwise 0. torch keeps the wrapper of an object that Python code once accessed.
template <typename Impl>
std::int64_t unreferenced_wrappers(const Impl& impl) {
  const PyObject* wrapper = impl.pyobj_slot()->load_pyobj();
  return wrapper != nullptr && Py_REFCNT(wrapper) == 1 ? 1 : 0;
}

}  // namespace opacus_memprof
