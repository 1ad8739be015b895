// SPDX-License-Identifier: Apache-2.0
#include "allocators/program_line.h"

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#if PY_VERSION_HEX < 0x030B0000
#include <frameobject.h>
#endif

#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "core/names.h"
#include "core/spin_lock.h"

namespace opacus_memprof {

namespace {

// One call: its code, and the offset of the instruction that runs, in bytes.
struct Position {
  const PyCodeObject* code = nullptr;
  std::ptrdiff_t offset = 0;

  friend bool operator==(const Position&, const Position&) = default;
};

// --- CPython's frames ---
//
// torch has released the GIL, so nothing here may need it. The frames of the calling thread stand
// still while it runs C++ code, and keep their code objects, which never change, alive.

#if defined(Py_GIL_DISABLED) || PY_VERSION_HEX >= 0x030F0000

// The layout of frames is not known here, or another thread may change them.
struct Frame {};
const Frame* innermost(const PyThreadState&) noexcept { return nullptr; }
const Frame* caller(const Frame&) noexcept { return nullptr; }
Position position(const Frame&) noexcept { return {}; }

#elif PY_VERSION_HEX < 0x030B0000

using Frame = PyFrameObject;
const Frame* innermost(const PyThreadState& thread) noexcept { return thread.frame; }
const Frame* caller(const Frame& frame) noexcept { return frame.f_back; }
Position position(const Frame& frame) noexcept {
  return {frame.f_code, frame.f_lasti * static_cast<std::ptrdiff_t>(sizeof(_Py_CODEUNIT))};
}

#else

// The beginning of _PyInterpreterFrame, which only internal headers declare.
struct Frame {
#if PY_VERSION_HEX < 0x030C0000
  void* function;
  void* globals;
  void* builtins;
  void* locals;
  std::uintptr_t executable;
  void* object;
  const Frame* previous;
  const char* instruction;
#else
  std::uintptr_t executable;  // from 3.14 on its lowest bits are flags
  const Frame* previous;
  void* function;
  void* globals;
  void* builtins;
  void* locals;
  void* object;
  const char* instruction;
#endif
};

const Frame* innermost(const PyThreadState& thread) noexcept {
#if PY_VERSION_HEX < 0x030D0000
  const void* frame = thread.cframe == nullptr ? nullptr : thread.cframe->current_frame;
#else
  const void* frame = thread.current_frame;
#endif
  return static_cast<const Frame*>(frame);
}

const Frame* caller(const Frame& frame) noexcept { return frame.previous; }

// Between calls from C there are frames without code.
Position position(const Frame& frame) noexcept {
  const auto* executable = reinterpret_cast<PyObject*>(frame.executable & ~std::uintptr_t{3});
  if (executable == nullptr || !PyCode_Check(executable)) return {};
  const auto* code = reinterpret_cast<const PyCodeObject*>(executable);
  return {code, frame.instruction - reinterpret_cast<const char*>(code->co_code_adaptive)};
}

#endif

// --- lines ---

void append_utf8(std::string& text, Py_UCS4 letter) {
  constexpr unsigned kContinued = 0x80;
  constexpr unsigned kBits = 0x3F;
  const auto add = [&](unsigned byte) { text += static_cast<char>(byte); };
  if (letter < 0x80) {
    add(letter);
    return;
  }
  if (letter < 0x800) {
    add(0xC0U | letter >> 6U);
  } else {
    if (letter < 0x10000) {
      add(0xE0U | letter >> 12U);
    } else {
      add(0xF0U | letter >> 18U);
      add(kContinued | (letter >> 12U & kBits));
    }
    add(kContinued | (letter >> 6U & kBits));
  }
  add(kContinued | (letter & kBits));
}

// Python's own conversion would keep its result in the object.
std::string text_of(PyObject* name) {
  std::string text;
  const Py_ssize_t length = PyUnicode_GET_LENGTH(name);
  for (Py_ssize_t at = 0; at < length; ++at) append_utf8(text, PyUnicode_READ_CHAR(name, at));
  return text;
}

// A call, with what distinguishes its code from another that later has the same address.
struct Call {
  Position at;
  std::uint64_t fingerprint = 0;

  friend bool operator==(const Call&, const Call&) = default;
};

constexpr std::uint64_t mix(std::uint64_t hash, std::uint64_t value) noexcept {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15U;
  return hash ^ hash >> 32U;
}

std::uint64_t hash_of_bytes(const void* bytes, Py_ssize_t size) noexcept {
  return std::hash<std::string_view>{}(
      {static_cast<const char*>(bytes), static_cast<std::size_t>(size)});
}

// Hashes the path, the name, and the beginning of the table of lines. A new object often has the
// address of an old one, so their contents count.
std::uint64_t fingerprint_of(const PyCodeObject& code) noexcept {
  constexpr Py_ssize_t kLines = 64;
  std::uint64_t hash = static_cast<std::uint64_t>(code.co_firstlineno);
  for (PyObject* text : {code.co_filename, code.co_name}) {
    hash = mix(hash, hash_of_bytes(PyUnicode_DATA(text),
                                   PyUnicode_GET_LENGTH(text) * PyUnicode_KIND(text)));
  }
  const Py_ssize_t size = PyBytes_GET_SIZE(code.co_linetable);
  hash = mix(hash, hash_of_bytes(PyBytes_AS_STRING(code.co_linetable), std::min(size, kLines)));
  return mix(hash, static_cast<std::uint64_t>(size));
}

constexpr std::size_t kFrames = 3;
using Stack = std::array<Call, kFrames>;

struct StackHash {
  std::size_t operator()(const Stack& stack) const noexcept {
    std::uint64_t hash = 0;
    for (const Call& call : stack) {
      hash = mix(hash, call.fingerprint);
      hash = mix(hash, static_cast<std::uint64_t>(call.at.offset));
    }
    return hash;
  }
};

// Thread safe.
class Lines {
 public:
  std::uint16_t here(const PyThreadState& thread) {
    Stack stack;
    {
      const std::lock_guard guard(lock_);
      if (!find_own(thread, stack)) return 0;
      const auto known = ops_.find(stack);
      if (known != ops_.end()) return known->second;
      if (ops_.size() == kMost) return 0;
    }
    const std::uint16_t op = intern(stack);
    const std::lock_guard guard(lock_);
    ops_.emplace(stack, op);
    return op;
  }

  void set_program(std::vector<std::string> libraries, std::vector<std::string> folders) {
    const std::lock_guard guard(lock_);
    libraries_.swap(libraries);
    folders_.swap(folders);
    ops_.clear();
    recent_ = {};
  }

  // For pthread_atfork: no thread holds the lock while the process forks.
  void lock() noexcept { lock_.lock(); }
  void unlock() noexcept { lock_.unlock(); }

 private:
  static constexpr int kDeepest = 200;                         // frames that are looked at
  static constexpr std::size_t kMost = std::size_t{1} << 14U;  // stacks, of which a program has few

  // Finds the innermost calls of the user's own code; returns whether there are any.
  bool find_own(const PyThreadState& thread, Stack& stack) {
    std::size_t found = 0;
    int rest = kDeepest;
    for (const Frame* frame = innermost(thread); frame != nullptr && rest > 0; --rest) {
      const Position at = position(*frame);
      if (at.code != nullptr && is_own(*at.code)) {
        stack[found++] = {.at = at, .fingerprint = fingerprint_of(*at.code)};
        if (found == stack.size()) break;
      }
      frame = caller(*frame);
    }
    return found > 0;
  }

  bool is_own(const PyCodeObject& code) {
    const auto address = reinterpret_cast<std::uintptr_t>(&code);
    Seen& seen = recent_[address / 64 % recent_.size()];
    if (seen.code != &code || seen.file != code.co_filename) {
      seen = {&code, code.co_filename, is_own_file(text_of(code.co_filename))};
    }
    return seen.own;
  }

  [[nodiscard]] bool is_own_file(const std::string& file) const {
    return !file.empty() && !file.starts_with("<frozen ") &&
           file.find("/site-packages/") == std::string::npos &&
           file.find("/dist-packages/") == std::string::npos &&
           std::ranges::none_of(libraries_,
                                [&](const std::string& path) { return file.starts_with(path); });
  }

  // "train.py:41 in update"
  std::string line_of(const Call& call) {
    std::string text = text_of(call.at.code->co_filename);
    {
      const std::lock_guard guard(lock_);
      for (const std::string& folder : folders_) {
        if (!text.starts_with(folder)) continue;
        text.erase(0, folder.size());
        break;
      }
    }
    auto* code = const_cast<PyCodeObject*>(call.at.code);
    text += ':';
    text += std::to_string(PyCode_Addr2Line(code, static_cast<int>(call.at.offset)));
    const std::string name = text_of(call.at.code->co_name);
    if (name != "<module>") (text += " in ") += name;
    return text;
  }

  std::uint16_t intern(const Stack& stack) {
    const std::string line = line_of(stack[0]);
    std::string all = line;
    for (std::size_t i = 1; i < kFrames && stack[i].at.code != nullptr; ++i) {
      all += " < " + line_of(stack[i]);
    }
    return names().intern_line(all, line);
  }

  struct Seen {
    const PyCodeObject* code = nullptr;
    const PyObject* file = nullptr;
    bool own = false;
  };

  SpinLock lock_;
  std::vector<std::string> libraries_;
  std::vector<std::string> folders_;
  std::array<Seen, 1024> recent_{};  // by address
  std::unordered_map<Stack, std::uint16_t, StackHash> ops_;
};

// Never destroyed: threads may outlive static destruction.
Lines& lines() {
  static auto* const instance = [] {
    const auto release = [] { lines().unlock(); };
    pthread_atfork([] { lines().lock(); }, release, release);
    return new Lines;
  }();
  return *instance;
}

}  // namespace

std::uint16_t program_line() noexcept {
  const PyThreadState* thread = PyGILState_GetThisThreadState();
  if (thread == nullptr) return 0;
  try {
    return lines().here(*thread);
  } catch (const std::exception&) {  // the host has no memory for it
    return 0;
  }
}

void set_program(std::vector<std::string> libraries, std::vector<std::string> folders) {
  lines().set_program(std::move(libraries), std::move(folders));
}

}  // namespace opacus_memprof
