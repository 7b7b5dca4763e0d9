// What this machine can do, measured: bytes read from memory a second and products a second in registers.
#include <immintrin.h>

#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

template <typename Work>
double timed(int threads, Work work) {
  std::vector<std::thread> others;
  const auto start = std::chrono::steady_clock::now();
  for (int t = 1; t < threads; ++t) others.emplace_back(work, t);
  work(0);
  for (auto& other : others) other.join();
  return seconds_since(start);
}

// Two streams a thread keep more reads in flight than one.
int64_t read(const char* from, int64_t bytes) {
  const int64_t half = bytes / 2 / 128 * 128;
  const char* other = from + half;
#ifdef __AVX512F__
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (int64_t i = 0; i < half; i += 128) {
    _mm_prefetch(from + i + 1024, _MM_HINT_T0), _mm_prefetch(other + i + 1024, _MM_HINT_T0);
    a = _mm512_or_si512(a, _mm512_loadu_si512(from + i)), b = _mm512_or_si512(b, _mm512_loadu_si512(from + i + 64));
    c = _mm512_or_si512(c, _mm512_loadu_si512(other + i)), d = _mm512_or_si512(d, _mm512_loadu_si512(other + i + 64));
  }
  return _mm512_reduce_or_epi64(_mm512_or_si512(_mm512_or_si512(a, b), _mm512_or_si512(c, d)));
#else
  __m256i a = _mm256_setzero_si256(), b = a;
  for (int64_t i = 0; i < half; i += 32) {
    a = _mm256_or_si256(a, _mm256_loadu_si256((const __m256i*)(from + i)));
    b = _mm256_or_si256(b, _mm256_loadu_si256((const __m256i*)(other + i)));
  }
  alignas(32) int64_t out[4];
  _mm256_store_si256((__m256i*)out, _mm256_or_si256(a, b));
  return out[0] | out[1] | out[2] | out[3];
#endif
}

// 24 independent accumulators, as the kernels' tiles have.
template <typename Vector, typename Step>
int64_t spin(int64_t rounds, Vector zero, Step step) {
  Vector sums[24];
  for (auto& s : sums) s = zero;
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 24
    for (int j = 0; j < 24; ++j) {
      sums[j] = step(sums[j]);
      asm volatile("" : "+v"(sums[j]));
    }
  }
  int64_t out = 0;
  for (auto& s : sums) out += reinterpret_cast<int64_t*>(&s)[0];
  return out;
}

volatile int64_t sink;

}  // namespace

extern "C" {

__attribute__((visibility("default"))) double moefx_bytes_a_second(const char* from, int64_t bytes, int threads) {
  const int64_t each = bytes / threads / 256 * 256;
  return each * threads / timed(threads, [&](int t) { sink = read(from + t * each, each); });
}

// Products and sums a second: kind 0 bf16, 1 fp32, 2 int8. 0 where this instruction set has none of its own.
__attribute__((visibility("default"))) double moefx_flops(int kind, int threads) {
  const int64_t rounds = 1 << 19;
  double each = 0, seconds = 1;
  auto run = [&](double products, auto work) { each = products, seconds = timed(threads, [&](int) { sink = work(); }); };
#ifdef __AVX512BF16__
  if (kind == 0) {
    const __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f80);
    run(64, [&] { return spin(rounds, _mm512_setzero_ps(), [&](__m512 s) { return _mm512_dpbf16_ps(s, one, one); }); });
  }
#endif
#ifdef __AVX512VNNI__
  if (kind == 2) {
    const __m512i one = _mm512_set1_epi8(1);
    run(128, [&] { return spin(rounds, _mm512_setzero_si512(), [&](__m512i s) { return _mm512_dpbusd_epi32(s, one, one); }); });
  }
#endif
#ifdef __AVX512F__
  if (kind == 1) {
    const __m512 one = _mm512_set1_ps(1e-20f);
    run(32, [&] { return spin(rounds, _mm512_setzero_ps(), [&](__m512 s) { return _mm512_fmadd_ps(one, one, s); }); });
  }
#else
  if (kind == 1) {
    const __m256 one = _mm256_set1_ps(1e-20f);
    run(16, [&] { return spin(rounds, _mm256_setzero_ps(), [&](__m256 s) { return _mm256_fmadd_ps(one, one, s); }); });
  }
#endif
  return each == 0 ? 0 : each * 24 * rounds * threads / seconds;
}
}
