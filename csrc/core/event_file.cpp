// SPDX-License-Identifier: Apache-2.0
#include "core/event_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "core/clock.h"

namespace opacus_memprof {

namespace {

constexpr std::uint64_t kChunkEvents =
    std::uint64_t{128} * 1024;  // 4 MiB; about a second of a busy run
constexpr std::uint64_t kAheadEvents = kChunkEvents / 2;
constexpr std::uint64_t kPage = 4096;
constexpr auto kPause = std::chrono::milliseconds(20);
constexpr int kPausesPerHousekeeping = 50;

#ifndef MADV_POPULATE_WRITE
constexpr int MADV_POPULATE_WRITE = 23;  // Linux 5.14; an older kernel refuses it and faults later
#endif

constexpr std::uint64_t kMostEvents =
    (std::uint64_t{PTRDIFF_MAX} - kHeaderBytes) / sizeof(Event);  // beyond, bytes_for would wrap

std::uint64_t bytes_for(std::uint64_t events) { return kHeaderBytes + events * sizeof(Event); }

}  // namespace

EventFile::EventFile(const std::string& path, std::uint64_t capacity,
                     std::function<void()> housekeeping)
    : path_(path),
      capacity_(std::max<std::uint64_t>(capacity, 1)),
      mapped_bytes_(bytes_for(capacity_)),
      housekeeping_(std::move(housekeeping)) {
  const auto failed = [this](int error) {
    return std::system_error(error, std::generic_category(), path_);
  };
  if (capacity_ > kMostEvents) throw failed(EFBIG);
  descriptor_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (descriptor_ < 0) throw failed(errno);
  try {
    // The whole bound is mapped at once, far beyond the file's end: addresses cost nothing.
    void* memory =
        ::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
    if (memory == MAP_FAILED) throw failed(errno);
    header_ = static_cast<FileHeader*>(memory);
    records_ = next_ = reinterpret_cast<Event*>(static_cast<char*>(memory) + kHeaderBytes);
    if (!reserve(std::min(kChunkEvents, capacity_))) throw failed(errno_);
    std::memcpy(header_->magic, kMagic, sizeof(kMagic));
    header_->version = kFormatVersion;
    header_->record_bytes = sizeof(Event);
    header_->capacity = capacity_;
    header_->pid = static_cast<std::uint64_t>(::getpid());
    set_wall_clock();
    header_->start_ticks = start_ticks_ = ticks();
    header_->start_unix_ns = unix_ns();
    refresh_header();
    populate(reserved_);
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    if (header_ != nullptr) ::munmap(header_, mapped_bytes_);
    ::close(descriptor_);
    ::unlink(path.c_str());
    throw;
  }
}

EventFile::~EventFile() {
  if (header_ == nullptr) return;  // abandoned
  {
    const std::lock_guard guard(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
  refresh_header();
  const std::uint64_t count = header_->count;
  header_->closed = 1;
  ::munmap(header_, mapped_bytes_);
  // A file that cannot be cut is longer than `count` says; readers go by `count`.
  [[maybe_unused]] const int cut = ::ftruncate(descriptor_, static_cast<off_t>(bytes_for(count)));
  ::close(descriptor_);
}

std::string EventFile::error() const {
  const std::lock_guard guard(mutex_);
  return errno_ == 0 ? "" : path_ + ": " + std::generic_category().message(errno_);
}

void EventFile::abandon() noexcept {
  // The thread does not exist in the child, and the file belongs to the parent.
  new (&thread_) std::thread;
  header_ = nullptr;
  ::close(descriptor_);
}

bool EventFile::make_room() noexcept {
  const std::lock_guard guard(mutex_);
  // Seldom: the file's own thread reserves ahead.
  return next_ < end_.load(std::memory_order_relaxed) || reserve(written() + kChunkEvents);
}

bool EventFile::reserve(std::uint64_t events) noexcept {
  const std::uint64_t want = std::min(events, capacity_);
  if (want <= reserved_ || errno_ != 0) return false;
  // What is reserved already is left out: tmpfs walks over it page by page.
  const std::uint64_t begin = reserved_ == 0 ? 0 : bytes_for(reserved_);
  const int error = ::posix_fallocate(descriptor_, static_cast<off_t>(begin),
                                      static_cast<off_t>(bytes_for(want) - begin));
  if (error != 0) {
    errno_ = error;
    return false;
  }
  reserved_ = want;
  end_.store(records_ + want, std::memory_order_relaxed);
  return true;
}

// Faults in the pages of the first `reserved` events that have not been yet.
void EventFile::populate(std::uint64_t reserved) noexcept {
  auto* begin = reinterpret_cast<char*>(header_) + bytes_for(populated_) / kPage * kPage;
  auto* end = reinterpret_cast<char*>(header_) + bytes_for(reserved);
  ::madvise(begin, static_cast<std::size_t>(end - begin), MADV_POPULATE_WRITE);
  populated_ = reserved;
}

void EventFile::run() {
  std::unique_lock lock(mutex_);
  for (int pauses = 0; !stopping_; ++pauses) {
    refresh_header();
    if (header_->count + kAheadEvents > reserved_ && reserve(reserved_ + kChunkEvents)) {
      const std::uint64_t reserved = reserved_;
      lock.unlock();
      populate(reserved);
      lock.lock();
    }
    if (pauses % kPausesPerHousekeeping == 0 && housekeeping_) {
      lock.unlock();
      housekeeping_();
      lock.lock();
      if (stopping_) break;
    }
    wake_.wait_for(lock, kPause);
  }
}

// By the file's own thread: counts what has been written since it last looked, so that the writer
// need not touch the header.
void EventFile::refresh_header() noexcept {
  const std::uint64_t limit = reserved_;
  std::uint64_t count = header_->count;
  const auto written = [this](std::uint64_t index) {
    auto& word = *reinterpret_cast<std::uint64_t*>(&records_[index]);
    return std::atomic_ref(word).load(std::memory_order_acquire) != 0;
  };
  while (count < limit && written(count)) ++count;
  header_->count = count;
  header_->dropped = dropped();
  header_->last_ticks = ticks();
  header_->last_unix_ns = unix_ns();
}

}  // namespace opacus_memprof
