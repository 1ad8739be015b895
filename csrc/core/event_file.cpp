// SPDX-License-Identifier: Apache-2.0
#include "core/event_file.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <new>
#include <system_error>
#include <utility>

namespace opacus_memprof {

namespace {

constexpr auto kPause = std::chrono::milliseconds(5);  // events of this long may be lost by SIGKILL
constexpr int kPausesPerHousekeeping = 200;

}  // namespace

EventFile::EventFile(const std::string& path, std::uint64_t capacity, Calls calls)
    : path_(path), calls_(std::move(calls)), recorder_(path, capacity) {
  ring_.set_start_ticks(recorder_.header().start_ticks);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    recorder_.remove();
    throw;
  }
}

EventFile::~EventFile() {
  if (!thread_.joinable()) return;  // abandoned
  {
    const std::lock_guard guard(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
  write_or_fail();
  recorder_.write_header(true);
}

std::uint64_t EventFile::dropped() const noexcept { return ring_.lost() + lost_; }

std::string EventFile::error() const {
  const int error = errno_;
  return error == 0 ? "" : path_ + ": " + std::generic_category().message(error);
}

void EventFile::abandon() noexcept {
  // The thread does not exist in the child, and the files belong to the parent.
  new (&thread_) std::thread;
  recorder_.abandon();
}

void EventFile::flush() {
  std::unique_lock lock(mutex_);
  const std::uint64_t wanted = ring_.appended();
  wanted_ = std::max(wanted_, wanted);
  wake_.notify_one();
  flushed_.wait(lock, [&] { return done_ >= wanted || stopping_; });
}

void EventFile::run() {
  std::unique_lock lock(mutex_);
  for (int pauses = 0; !stopping_; ++pauses) {
    lock.unlock();
    ring_.read_clock();
    write_or_fail();
    recorder_.write_header(false);
    if (pauses % kPausesPerHousekeeping == 0 && calls_.housekeeping) calls_.housekeeping();
    lock.lock();
    done_ = ring_.released();
    flushed_.notify_all();
    wake_.wait_for(lock, kPause, [this] { return stopping_ || wanted_ > done_; });
  }
}

// Without memory for the live set there are no more pieces, and the program continues.
void EventFile::write_or_fail() noexcept {
  try {
    write();
  } catch (const std::bad_alloc&) {
    failed_ = true;
    errno_ = ENOMEM;
  }
}

void EventFile::write() {
  const bool losing = ring_.is_losing();
  for (auto events = ring_.readable(); !events.empty(); events = ring_.readable()) {
    if (failed_) {
      lost_ += events.size();
    } else {
      recorder_.take(events);
    }
    ring_.release(events.size());
  }
  if (failed_) return;
  if (losing && calls_.live_blocks) {
    const std::vector<Block> live = calls_.live_blocks(*this);
    const std::uint64_t before = std::exchange(skipped_, ring_.lost_before());
    recorder_.skip(skipped_ - before, live);
  }
  lost_ = recorder_.lost() - skipped_;
  if (recorder_.error() != 0) errno_ = recorder_.error();
}

}  // namespace opacus_memprof
