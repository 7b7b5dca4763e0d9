// Memory for one call.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace {

// Memory of a calling thread, kept between calls up to a limit.
class Scratch {
 public:
  ~Scratch() { release(); }
  uint8_t* get(int64_t bytes) {
    if (bytes > size_) {
      release();
      base_ = (uint8_t*)::operator new(bytes, std::align_val_t(4096));
      size_ = bytes;
      madvise(base_, size_, MADV_HUGEPAGE);
    }
    return base_;
  }
  void trim() {
    if (size_ > (int64_t(64) << 20)) release();
  }

 private:
  void release() {
    if (base_) ::operator delete(base_, std::align_val_t(4096));
    base_ = nullptr, size_ = 0;
  }
  uint8_t* base_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace
