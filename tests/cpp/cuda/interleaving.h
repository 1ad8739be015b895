// SPDX-License-Identifier: Apache-2.0
// Threads of which one runs at a time: at each pause() a seed draws who goes on. The same seed
// gives the same interleaving.
#pragma once

#include <functional>
#include <memory>
#include <random>
#include <semaphore>
#include <thread>
#include <vector>

namespace opacus_memprof::testing {

class Interleaving {
 public:
  // `check` is called at each pause, while nobody runs.
  Interleaving(unsigned seed, std::function<void()> check)
      : random_(seed), check_(std::move(check)) {}

  // Runs these to their ends, each on a thread.
  void run(const std::vector<std::function<void()>>& bodies) {
    for (std::size_t i = 0; i < bodies.size(); ++i) {
      turns_.push_back(std::make_unique<std::binary_semaphore>(0));
      running_.push_back(i);
    }
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < bodies.size(); ++i) {
      threads.emplace_back([this, i, &body = bodies[i]] {
        turns_[i]->acquire();
        current_ = this;
        self_ = i;
        body();
        std::erase(running_, i);
        if (!running_.empty()) turns_[draw()]->release();
      });
    }
    turns_[draw()]->release();
    for (std::thread& thread : threads) thread.join();
  }

  // Lets another thread of the interleaving that the caller belongs to go on; false if it is in
  // none.
  static bool pause() {
    if (current_ == nullptr) return false;
    current_->give_turn();
    return true;
  }

 private:
  std::size_t draw() { return running_[random_() % running_.size()]; }

  void give_turn() {
    check_();
    const std::size_t next = draw();
    if (next == self_) return;
    turns_[next]->release();
    turns_[self_]->acquire();
  }

  static inline thread_local Interleaving* current_ = nullptr;
  static inline thread_local std::size_t self_ = 0;

  std::mt19937 random_;
  std::function<void()> check_;
  std::vector<std::unique_ptr<std::binary_semaphore>> turns_;
  std::vector<std::size_t> running_;  // whose bodies have not ended
};

}  // namespace opacus_memprof::testing
