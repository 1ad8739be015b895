// SPDX-License-Identifier: Apache-2.0
#include "hooks/captures.h"

#include <c10/util/intrusive_ptr.h>

#include <algorithm>

#include "allocators/reporting.h"
#include "allocators/storage.h"
#include "core/recorder.h"

namespace opacus_memprof {

namespace {

// A block under a captured tensor. The weak reference allows asking later how many objects hold the
// storage, without holding it.
struct CapturedBlock {
  BlockId block;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
};

// The captures of one module: the blocks of all captures in one vector, and the index at which each
// capture begins. The vectors keep their capacity, because each step captures as many as the last
// one.
class CaptureStack {
 public:
  void push() { begins_.push_back(blocks_.size()); }
  void add_to_newest(CapturedBlock block) { blocks_.push_back(std::move(block)); }
  void pop() {
    blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(begins_.back()), blocks_.end());
    begins_.pop_back();
  }

  [[nodiscard]] std::size_t size() const noexcept { return begins_.size(); }
  [[nodiscard]] std::span<const CapturedBlock> newest() const {
    return std::span(blocks_).subspan(begins_.back());
  }
  [[nodiscard]] std::span<const CapturedBlock> blocks() const { return blocks_; }

 private:
  std::vector<CapturedBlock> blocks_;
  std::vector<std::size_t> begins_;
};

std::size_t outstanding = 0;  // number of captures, of all modules

// By module id. Never destroyed: hooks may run while the process ends.
std::vector<CaptureStack>& capture_stacks() {
  static auto* const instance = new std::vector<CaptureStack>;
  return *instance;
}

// One entry for each tensor that only the program holds: its storage.
using ProgramHolders = std::vector<const c10::StorageImpl*>;

bool has_one_holder(const at::TensorBase& tensor) {
  const auto holders = static_cast<std::int64_t>(tensor.use_count());
  return holders - unreferenced_wrappers(*tensor.unsafeGetTensorImpl()) <= 1;
}

// Returns the number of holders of the storage, without the program; 0 if it has been freed.
std::int64_t count_holders(const c10::weak_intrusive_ptr<c10::StorageImpl>& reference,
                           const ProgramHolders& program_holders) {
  const auto storage = reference.lock();
  if (!storage) return 0;
  return static_cast<std::int64_t>(storage.use_count()) - 1 - unreferenced_wrappers(*storage) -
         std::ranges::count(program_holders, storage.get());
}

[[gnu::hot]] void settle(const CaptureStack& stack, const ProgramHolders& program_holders = {}) {
  for (const CapturedBlock& captured : stack.blocks()) {
    recorder().settle(captured.block, count_holders(captured.storage, program_holders));
  }
}

}  // namespace

[[gnu::hot]] void capture_tensors(std::uint16_t module, std::span<PyObject* const> tensors) {
  if (module >= capture_stacks().size()) capture_stacks().resize(module + std::size_t{1});
  CaptureStack& stack = capture_stacks()[module];
  stack.push();
  ++outstanding;
  for (PyObject* tensor : tensors) {
    c10::StorageImpl* storage = storage_of(tensor);
    if (storage == nullptr) continue;
    const BlockId block =
        recorder().capture(address_of(storage->_mutable_data_ptr_no_checks().get()));
    if (block.serial == 0) continue;
    stack.add_to_newest({.block = block,
                         .storage = c10::weak_intrusive_ptr<c10::StorageImpl>(
                             c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage))});
  }
}

[[gnu::hot]] void release_captures(std::uint16_t module) {
  if (module >= capture_stacks().size() || capture_stacks()[module].size() == 0) return;
  CaptureStack& stack = capture_stacks()[module];
  for (const CapturedBlock& captured : stack.newest()) recorder().release(captured.block);
  stack.pop();
  --outstanding;
}

[[gnu::hot]] void settle_captures(std::uint16_t module) {
  if (module < capture_stacks().size()) settle(capture_stacks()[module]);
}

[[gnu::hot]] void settle_all_captures(std::span<PyObject* const> outputs) {
  if (outstanding == 0) return;
  ProgramHolders program_holders;
  for (PyObject* output : outputs) {
    if (!THPVariable_Check(output)) continue;
    const at::Tensor& tensor = THPVariable_Unpack(output);
    // If autograd had saved the tensor, it would hold the same object. A view, as every output of a
    // module with a backward hook is, also holds its base.
    if (!has_one_holder(tensor)) continue;
    program_holders.push_back(storage_of(tensor));
    if (tensor.is_view() && has_one_holder(tensor._base())) {
      program_holders.push_back(storage_of(tensor._base()));
    }
  }
  for (const CaptureStack& stack : capture_stacks()) settle(stack, program_holders);
}

std::vector<std::pair<std::uint16_t, std::size_t>> outstanding_captures() {
  std::vector<std::pair<std::uint16_t, std::size_t>> result;
  if (outstanding == 0) return result;
  for (std::size_t module = 0; module < capture_stacks().size(); ++module) {
    const std::size_t count = capture_stacks()[module].size();
    if (count > 0) result.emplace_back(static_cast<std::uint16_t>(module), count);
  }
  return result;
}

}  // namespace opacus_memprof
