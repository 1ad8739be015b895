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

std::string file_of(PyCodeObject* code) {
  const char* const text = PyUnicode_AsUTF8(code->co_filename);
  if (text == nullptr) PyErr_Clear();
  return text == nullptr ? "" : text;
}

// The innermost line of this thread's Python that is the program's.
std::string line_of_program() {
  if (Py_IsInitialized() == 0) return "";
  const PyGILState_STATE held = PyGILState_Ensure();
  std::string line;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame != nullptr) {
    PyCodeObject* const code = PyFrame_GetCode(frame);
    if (const std::string file = file_of(code); is_the_programs(file)) {
      line = file + ":" + std::to_string(PyFrame_GetLineNumber(frame));
    }
    Py_DECREF(code);
    PyFrameObject* const outer = line.empty() ? PyFrame_GetBack(frame) : nullptr;
    Py_DECREF(frame);
    frame = outer;
  }
  PyGILState_Release(held);
  return line;
}

}  // namespace

void count_unknown_read(const std::string& operation) {
  std::string line = line_of_program();
  const std::lock_guard lock(mutex);
  ++reads[{operation, std::move(line)}];
}

void count_assumed_shape(const std::string& operation) {
  std::string line = line_of_program();
  const std::lock_guard lock(mutex);
  ++shapes[{operation, std::move(line)}];
}

void count_failure(const std::string& operation) {
  const std::lock_guard lock(mutex);
  ++failed[operation];
}

Uses unknown_reads() {
  const std::lock_guard lock(mutex);
  return reads;
}

Uses assumed_shapes() {
  const std::lock_guard lock(mutex);
  return shapes;
}

std::map<std::string, std::uint64_t> failures() {
  const std::lock_guard lock(mutex);
  return failed;
}

void set_libraries(std::vector<std::string> folders) { libraries = std::move(folders); }

}  // namespace opacus_memprof::virtual_values
