// SPDX-License-Identifier: Apache-2.0
#include "virtual_values/counts.h"

#include <Python.h>
#include <frameobject.h>  // PyFrame_GetBack, in Python 3.10

#include <algorithm>
#include <mutex>

namespace opacus_memprof::virtual_values {
namespace {

std::mutex mutex;
Uses reads;
Uses shapes;
std::map<std::string, std::uint64_t> failed;
std::vector<std::string> libraries;

bool is_the_programs(const std::string& file) {
  return !file.empty() && file.front() != '<' &&
         std::none_of(libraries.begin(), libraries.end(),
                      [&](const std::string& folder) { return file.starts_with(folder); });
}

std::string text_of(PyObject* string) {
  const char* const text = PyUnicode_AsUTF8(string);
  if (text == nullptr) PyErr_Clear();
  return text == nullptr ? "" : text;
}

struct Place {
  std::string line;   // the innermost of this thread's Python that is the program's
  std::string stack;  // a line for each frame, the innermost first
};

constexpr int kFrames = 32;

// What the frame evaluates, as ":first column:last line:last column"; empty where that is not
// known, as in Python 3.10.
std::string columns_of([[maybe_unused]] PyFrameObject* frame, [[maybe_unused]] PyCodeObject* code) {
#if PY_VERSION_HEX >= 0x030B0000
  int line = -1, column = -1, last_line = -1, last_column = -1;
  const int found =
      PyCode_Addr2Location(code, PyFrame_GetLasti(frame), &line, &column, &last_line, &last_column);
  if (found != 0 && std::min({column, last_line, last_column}) >= 0)
    return ':' + std::to_string(column) + ':' + std::to_string(last_line) + ':' +
           std::to_string(last_column);
#endif
  return "";
}

Place place() {
  Place found;
  if (Py_IsInitialized() == 0) return found;
  const PyGILState_STATE held = PyGILState_Ensure();
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  for (int depth = 0; frame != nullptr; ++depth) {
    PyCodeObject* const code = PyFrame_GetCode(frame);
    const std::string file = text_of(code->co_filename);
    const std::string line = file + ":" + std::to_string(PyFrame_GetLineNumber(frame));
    if (found.line.empty() && is_the_programs(file)) found.line = line;
    if (depth < kFrames)
      found.stack += '\n' + line + columns_of(frame, code) + ':' + text_of(code->co_name);
    Py_DECREF(code);
    PyFrameObject* const outer =
        depth < kFrames || found.line.empty() ? PyFrame_GetBack(frame) : nullptr;
    Py_DECREF(frame);
    frame = outer;
  }
  PyGILState_Release(held);
  return found;
}

void count(Uses& uses, const std::string& operation) {
  const Place at = place();
  const std::lock_guard lock(mutex);
  ++uses[{operation, at.line + at.stack}];
}

Uses copy_of(const Uses& uses) {
  const std::lock_guard lock(mutex);
  return uses;
}

}  // namespace

void count_unknown_read(const std::string& operation, State state) {
  count(reads, state == State::alike ? kOfRanks + operation : operation);
}

void count_assumed_shape(const std::string& operation) { count(shapes, operation); }

void count_failure(const std::string& operation) {
  const std::lock_guard lock(mutex);
  ++failed[operation];
}

Uses unknown_reads() { return copy_of(reads); }

Uses assumed_shapes() { return copy_of(shapes); }

std::map<std::string, std::uint64_t> failures() {
  const std::lock_guard lock(mutex);
  return failed;
}

void set_libraries(std::vector<std::string> folders) { libraries = std::move(folders); }

}  // namespace opacus_memprof::virtual_values
