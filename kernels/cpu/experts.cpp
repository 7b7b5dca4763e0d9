// Routed experts of one layer in one call: rows sorted by expert, gate and up, activation, down, weighted sum over each token's experts.
//
// Weights lie in panels (pack.h), so that they are read once, in order. Threads take items of work in one fixed order (plan.h); each
// number of the result comes from one thread, in an order of its own, so results do not depend on the number of threads.

#include "operators.h"
#include "pack.h"

namespace {

template <class Function>
int guarded(Function function) {
  try {
    function();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // namespace

#define MOEFX_API extern "C" __attribute__((visibility("default")))

// Gives torch the operators; `library` is its handle of them. 0 when it took them.
MOEFX_API int moefx_install(const Host* from, Handle* library) {
  host = *from;
  const Torch& t = host.torch;
  return t.library_init_impl("moefx", "CPU", __FILE__, __LINE__, library) || t.library_impl(*library, "experts_cpu_packed", operate<-1, 0>, kVersion) ||
         t.library_impl(*library, "experts_cpu_fp8", operate<kFp8, 1>, kVersion) ||
         t.library_impl(*library, "experts_cpu_fp8_weight_only", operate<kFp8WeightOnly, 1>, kVersion) ||
         t.library_impl(*library, "experts_cpu_int8", operate<kInt8, 2>, kVersion);
}

// 0, or 1 when memory is short.
MOEFX_API int moefx_pack(const PackCall* call) {
  return guarded([&] {
    const PackCall c = *call;
    Counter next;
    const int64_t units = pack_units(c);
    auto work = [&] {
      for (int64_t unit; (unit = next.value.fetch_add(1, std::memory_order_relaxed)) < units;) pack_unit(c, unit);
    };
    on_threads(c.threads, GompParallel(c.gomp), work);
  });
}

// Ask for large pages before memory is first written: with 4 KiB pages address translation takes a fifth of the bandwidth.
MOEFX_API void moefx_large_pages(void* base, int64_t bytes) {
  const uintptr_t page = uintptr_t(1) << 21, small = 4096;
  const uintptr_t begin = (uintptr_t(base) + small - 1) & ~(small - 1), end = (uintptr_t(base) + bytes) & ~(small - 1);
  if (begin < end && end - begin >= page) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
}
