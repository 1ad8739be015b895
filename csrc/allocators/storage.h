// SPDX-License-Identifier: Apache-2.0
// The storage under a tensor, and how many hold it. Inline: retagging asks for every tensor.
#pragma once

#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>

namespace opacus_memprof {

// nullptr where there is no memory (meta, fake and wrapper tensors).
inline c10::StorageImpl* storage_of(const at::TensorBase& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// The storage of `_local_tensor`, which holds the bytes of a DTensor; `own_storage` where the
// object has no such attribute.
c10::StorageImpl* storage_of_local_tensor(PyObject* object, c10::StorageImpl* own_storage);

// nullptr also where the object is no tensor.
inline c10::StorageImpl* storage_of(PyObject* object) {
  if (!THPVariable_Check(object)) return nullptr;
  c10::StorageImpl* storage = storage_of(THPVariable_Unpack(object));
  if (THPVariable_CheckExact(object) || (storage != nullptr && storage->data() != nullptr)) {
    return storage;
  }
  return storage_of_local_tensor(object, storage);
}

// 1 if the tensor's or storage's use count includes a Python wrapper that nobody refers to: torch
// keeps the wrapper of an object that Python code once looked at. Else 0.
template <typename Impl>
std::int64_t unreferenced_wrappers(const Impl& impl) {
  const PyObject* wrapper = impl.pyobj_slot()->load_pyobj();
  return wrapper != nullptr && Py_REFCNT(wrapper) == 1 ? 1 : 0;
}

}  // namespace opacus_memprof
