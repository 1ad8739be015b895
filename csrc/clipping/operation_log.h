// SPDX-License-Identifier: Apache-2.0
// Recognizes whether a forward, or the computation of a loss, has run known operations with known
// numbers.
#pragma once

#include <ATen/record_function.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace opacus_memprof::clipping {

// Operations that are known, such as those of proved forwards. An operation is known by its
// operator and the two before it, so that a loop over more tokens runs the same ones. Its numbers
// are its arguments that are floating point or flags, the numbers that Python multiplies by or
// adds, and dimensions. All that a program reads to compute (a file, the time, a global variable)
// comes through operations and their numbers, or through the values of tensors.
class OperationLog {
 public:
  OperationLog() = default;
  OperationLog(const OperationLog&) = delete;
  OperationLog& operator=(const OperationLog&) = delete;
  ~OperationLog();

  // Records the operations that this thread runs until `end`; without `with_inner`, only outermost
  // ones, because a dispatch mode of Python's changes what runs inside of them.
  void begin(bool with_inner);

  // Ends the record. Returns whether it has unknown operations or numbers; true if another thread
  // began it, as that may be adding to it. Where forwards draw random numbers, parts of them may be
  // skipped, so that equal operations are not told apart by their order.
  bool end(bool is_ordered);

  // Adds the last record to the known operations.
  void learn();

 private:
  struct Numbers {
    std::unordered_set<std::uint64_t> values;
    int changes = 0;  // forwards that were not the first, and had a new value
  };
  struct Operation {
    std::uint64_t context;  // its operator and the two before it
    std::uint64_t numbers;  // 0 if it has none
  };
  // Shared with the thread that adds to it, which may live longer than the log.
  struct Record {
    bool with_inner = true;
    std::atomic<bool> is_open = true;
    int depth = 0;  // of operations inside of others
    std::uint64_t before = 0;
    std::uint64_t before_that = 0;
    std::uint64_t sequence = 0;  // of all operations and numbers
    std::vector<Operation> operations;
  };
  // What the running thread records.
  struct Recording {
    std::shared_ptr<Record> record;
    at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;
    void end();
  };

  static std::unique_ptr<at::ObserverContext> record(const at::RecordFunction& operation);
  static void leave(const at::RecordFunction& operation, at::ObserverContext* context);

  [[nodiscard]] bool is_unknown(std::uint64_t key, std::uint64_t value) const;
  [[nodiscard]] bool has_unknown(bool is_ordered) const;

  static thread_local Recording recording_;

  std::shared_ptr<Record> record_;  // the one that has begun
  std::vector<Operation> last_;     // those of the one that has ended

  std::unordered_set<std::uint64_t> sequences_;  // found to be known, so that they need no search
  std::unordered_set<std::uint64_t> contexts_;
  std::unordered_map<std::uint64_t, Numbers> numbers_;  // by context, and by ordinal
};

}  // namespace opacus_memprof::clipping
