// SPDX-License-Identifier: Apache-2.0
#include "core/tag_stack.h"

#include <pthread.h>

#include <array>

#include "core/names.h"

namespace opacus_memprof {

namespace detail {

constinit thread_local ThreadTags* tags_of_this_thread = nullptr;

ThreadTags& make_tags_of_this_thread() {
  // The hot path reads the pointer above; this owner destroys the object with its thread. Blocks
  // that the thread's other destructors free even later are counted under shared tags.
  struct Owner {
    Owner() { tags_of_this_thread = new ThreadTags; }
    Owner(const Owner&) = delete;
    Owner& operator=(const Owner&) = delete;
    ~Owner() {
      // NOLINTNEXTLINE(bugprone-unhandled-exception-at-new): without room for it the process ends
      static auto* const after_the_end = new ThreadTags;
      delete tags_of_this_thread;
      tags_of_this_thread = after_the_end;
    }
  };
  thread_local const Owner owner;
  return *tags_of_this_thread;
}

}  // namespace detail

ThreadTags::ThreadTags() {
  std::array<char, 16> name{};
  if (pthread_getname_np(pthread_self(), name.data(), name.size()) != 0) name[0] = '\0';
  thread_id_ = static_cast<std::uint8_t>(names().intern(Names::Kind::thread, name.data()));
}

void ThreadTags::set_phase(Phase phase) noexcept {
  phase_ = phase;
  phase_epoch_ = backward_state.epoch();
}

}  // namespace opacus_memprof
