// What this machine can do, measured: bytes read from memory a second, and products a second in registers.
//
// The work runs on torch's own OpenMP threads when the caller passes libgomp's entry point: they spin for milliseconds after a parallel
// region and would take the cores from threads of our own. Time is counted from the moment every thread has begun.
#include <immintrin.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace {

using GompParallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Job {
  void (*work)(const Job&, int thread);
  const char* from;
  int64_t count;
  int threads;
  std::atomic<int> begun{0}, next{0};
  std::atomic<double> start{0};
};

void enter(void* data) {
  Job& job = *static_cast<Job*>(data);
  const int thread = job.next++;
  if (++job.begun == job.threads) job.start = now();
  while (job.begun < job.threads) {
  }
  job.work(job, thread);
}

// Negative when memory or threads are short.
double seconds(Job& job, GompParallel parallel) {
  if (parallel != nullptr) {
    parallel(enter, &job, job.threads, 0);
  } else {
    std::vector<std::thread> others;
    try {
      for (int t = 1; t < job.threads; ++t) others.emplace_back(enter, &job);
    } catch (const std::exception&) {
      job.count = 0, job.begun = job.threads;  // those that wait for the rest end at once
      for (auto& other : others) other.join();
      return -1;
    }
    enter(&job);
    for (auto& other : others) other.join();
  }
  return now() - job.start;
}

volatile int64_t sink;

#ifdef __AVX512F__
using Vector = __m512i;
using Floats = __m512;
Vector load(const char* at) { return _mm512_loadu_si512(at); }
Vector join(Vector a, Vector b) { return _mm512_xor_si512(a, b); }
#else
using Vector = __m256i;
using Floats = __m256;
Vector load(const char* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
Vector join(Vector a, Vector b) { return _mm256_xor_si256(a, b); }
#endif
constexpr int64_t kWidth = sizeof(Vector);

// Two streams a thread keep more reads in flight than one.
void read(const Job& job, int thread) {
  const int64_t half = job.count / job.threads / 2 / (4 * kWidth) * (4 * kWidth);
  const char* a = job.from + 2 * half * thread;
  const char* b = a + half;
  Vector sums[8] = {};
  for (int64_t k = 0; k < half; k += 4 * kWidth) {
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      sums[q] = join(sums[q], load(a + k + q * kWidth)), sums[4 + q] = join(sums[4 + q], load(b + k + q * kWidth));
    }
  }
  for (int q = 1; q < 8; ++q) sums[0] = join(sums[0], sums[q]);
  sink = reinterpret_cast<const int64_t*>(&sums[0])[0];
}

// Twelve chains of one instruction, so that its latency never counts.
#define CHAIN(text, i) text " %12,%12,%" #i "\n"
#define CHAINS(name, text)                                                                                                       \
  void name(const Job& job, int) {                                                                                               \
    Floats x{}, a{}, b{}, c{}, d{}, e{}, f{}, g{}, h{}, i{}, j{}, k{}, l{};                                                      \
    for (int64_t n = 0; n < job.count; ++n)                                                                                      \
      asm volatile(CHAIN(text, 0) CHAIN(text, 1) CHAIN(text, 2) CHAIN(text, 3) CHAIN(text, 4) CHAIN(text, 5) CHAIN(text, 6)      \
                       CHAIN(text, 7) CHAIN(text, 8) CHAIN(text, 9) CHAIN(text, 10) CHAIN(text, 11)                              \
                   : "+v"(a), "+v"(b), "+v"(c), "+v"(d), "+v"(e), "+v"(f), "+v"(g), "+v"(h), "+v"(i), "+v"(j), "+v"(k), "+v"(l) \
                   : "v"(x));                                                                                                    \
  }

CHAINS(fp32, "vfmadd231ps")
#ifdef __AVX512BF16__
CHAINS(bf16, "vdpbf16ps")
#endif
#ifdef __AVX512VNNI__
CHAINS(int8, "vpdpbusd")
#endif

}  // namespace

extern "C" {

// Negative, as the next, when memory or threads are short.
__attribute__((visibility("default"))) double moefx_bytes_a_second(const char* from, int64_t bytes, int threads, GompParallel parallel) {
  Job job{read, from, bytes, threads};
  return bytes / seconds(job, parallel);
}

// Multiplications and additions a second; kind 0 bf16, 1 fp32, 2 int8. 0 where this instruction set has none of its own.
__attribute__((visibility("default"))) double moefx_flops(int kind, int threads, GompParallel parallel) {
  void (*work)(const Job&, int) = kind == 1 ? fp32 : nullptr;
  double each = sizeof(Floats) / 4 * 2;
#ifdef __AVX512BF16__
  if (kind == 0) work = bf16, each *= 2;
#endif
#ifdef __AVX512VNNI__
  if (kind == 2) work = int8, each *= 4;
#endif
  if (work == nullptr) return 0;
  Job job{work, nullptr, 1 << 20, threads};
  return each * 12 * job.count * threads / seconds(job, parallel);
}
}
