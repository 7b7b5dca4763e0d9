// Run one function on several threads at once.
//
// Torch's own OpenMP threads are taken when the caller passes libgomp's entry point: they spin for milliseconds after each parallel
// region, so a second pool would fight with them for the cores. Else, and in a forked child (where libgomp's threads are gone), a pool of
// this library's own. A function must do with fewer threads than asked for.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace {

using Entry = void (*)(void*);
using GompParallel = void (*)(Entry, void*, unsigned threads, unsigned flags);

class Pool {
 public:
  // False when another call holds the pool.
  bool run(Entry entry, void* data, int threads) {
    std::unique_lock<std::mutex> owner(busy_, std::try_to_lock);
    if (!owner.owns_lock()) return false;
    std::unique_lock<std::mutex> lock(state_);
    while (int(workers_.size()) < threads - 1) workers_.emplace_back([this, seen = round_] { serve(seen); });
    entry_ = entry, data_ = data, wanted_ = threads - 1, running_ = 0, ++round_;
    lock.unlock();
    wake_.notify_all();
    entry(data);
    lock.lock();
    wanted_ = 0;
    idle_.wait(lock, [this] { return running_ == 0; });
    return true;
  }

 private:
  void serve(uint64_t seen) {
    std::unique_lock<std::mutex> lock(state_);
    for (;;) {
      wake_.wait(lock, [&] { return round_ != seen; });
      seen = round_;
      if (wanted_ == 0) continue;
      --wanted_, ++running_;
      lock.unlock();
      entry_(data_);
      lock.lock();
      if (--running_ == 0) idle_.notify_one();
    }
  }

  std::mutex busy_, state_;
  std::condition_variable wake_, idle_;
  std::vector<std::thread> workers_;
  Entry entry_ = nullptr;
  void* data_ = nullptr;
  int wanted_ = 0, running_ = 0;
  uint64_t round_ = 0;
};

// Never destroyed: its threads wait in it until the process ends. A child starts anew.
std::atomic<Pool*> pool{nullptr};
std::atomic<bool> forked{false};
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, [] {
  pool = nullptr;
  forked = true;
});

inline Pool& own_pool() {
  Pool* found = pool;
  if (found) return *found;
  Pool* made = new Pool;
  if (pool.compare_exchange_strong(found, made)) return *made;
  delete made;
  return *found;
}

template <class Function>
void on_threads(int64_t threads, GompParallel gomp, Function& function) {
  const Entry entry = [](void* data) { (*(Function*)data)(); };
  if (threads <= 1) return function();
  if (gomp && !forked) return gomp(entry, &function, unsigned(threads), 0);
  if (!own_pool().run(entry, &function, int(threads))) function();
}

// Alone in its cache line.
struct Counter {
  alignas(64) std::atomic<int64_t> value{0};
};

// Spin, then let others run: a machine may have fewer cores than threads.
template <class Ready>
void wait_until(Ready ready) {
  for (int spins = 0; !ready(); ++spins) {
    if (spins < 4000) {
      _mm_pause();
    } else {
      sched_yield();
    }
  }
}

}  // namespace
