// Routed experts in bf16 for few rows an expert, where reading the weights is what takes the time.
//
// Both products have their inner dimension contiguous ([E, 2D, H] and [E, H, D]), so weights are read once, in place, as they lie: a tile
// is 4 weight rows times up to 6 token rows, accumulated by AVX-512 BF16 dot products. Every thread owns the same columns of every expert:
// no atomics, and a result that does not depend on the number of threads.

#include <immintrin.h>

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace {

constexpr int kTokens = 6;
constexpr int kRows = 4;

inline float to_float(uint16_t value) {
  uint32_t bits = uint32_t(value) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

inline uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);  // NaN stays NaN
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline __m512bh load(const uint16_t* p) { return (__m512bh)_mm512_loadu_si512(p); }

// exp by 2^n * p(r), |r| <= ln2 / 2: relative error below 2e-7 over the range of normal floats; NaN propagates.
inline __m512 exp512(__m512 x) {
  const __m512 log2e = _mm512_set1_ps(1.44269504088896341f);
  __m512 clamped = _mm512_min_ps(_mm512_set1_ps(88.7f), _mm512_max_ps(_mm512_set1_ps(-87.3f), x));
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, log2e), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), clamped);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  __m512 result = _mm512_scalef_ps(p, n);
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_mov_ps(result, nan, x);
}

// min and max that propagate a NaN of x, as torch's clamp does.
inline __m512 at_most(__m512 x, __m512 bound) {
  return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, bound, _CMP_GT_OQ), bound);
}
inline __m512 at_least(__m512 x, __m512 bound) {
  return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, bound, _CMP_LT_OQ), bound);
}

struct Activation {
  int clamp;  // 0 none, 1 before the activation, 2 after it
  float limit, alpha, beta;
};

inline __m512 activate(__m512 gate, __m512 up, const Activation& a) {
  const __m512 limit = _mm512_set1_ps(a.limit), low = _mm512_set1_ps(-a.limit), one = _mm512_set1_ps(1.0f);
  if (a.clamp == 1) gate = at_most(gate, limit);
  if (a.clamp) up = at_least(at_most(up, limit), low);
  __m512 e = exp512(_mm512_mul_ps(gate, _mm512_set1_ps(-a.alpha)));
  __m512 value = _mm512_div_ps(gate, _mm512_add_ps(one, e));
  if (a.clamp == 2) value = at_most(value, limit);
  return _mm512_mul_ps(value, _mm512_add_ps(up, _mm512_set1_ps(a.beta)));
}

// out[t][r] = sum_k rows[t][k] * w[r][k] for TOKENS token rows and kRows weight rows of length k (a multiple of 32). The rows of the next
// tile lie `ahead` elements on; they are fetched meanwhile, since a row often is a page and hardware prefetch stops at its end.
template <int TOKENS>
inline void tile(const uint16_t* const* rows, const uint16_t* const* w, int64_t k, int64_t ahead, float out[kTokens][kRows]) {
  __m512 sums[TOKENS][kRows];
  for (int t = 0; t < TOKENS; ++t)
    for (int r = 0; r < kRows; ++r) sums[t][r] = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; i += 32) {
    __m512bh a[kRows];
    for (int r = 0; r < kRows; ++r) a[r] = load(w[r] + i);
    for (int r = 0; r < kRows; ++r) _mm_prefetch((const char*)(w[r] + i + ahead), _MM_HINT_T1);
    for (int t = 0; t < TOKENS; ++t) {
      __m512bh x = load(rows[t] + i);
      for (int r = 0; r < kRows; ++r) sums[t][r] = _mm512_dpbf16_ps(sums[t][r], a[r], x);
    }
  }
  for (int t = 0; t < TOKENS; ++t)
    for (int r = 0; r < kRows; ++r) out[t][r] = _mm512_reduce_add_ps(sums[t][r]);
}

inline void tiles(int tokens, const uint16_t* const* rows, const uint16_t* const* w, int64_t k, int64_t ahead, float out[kTokens][kRows]) {
  switch (tokens) {
    case 1: return tile<1>(rows, w, k, ahead, out);
    case 2: return tile<2>(rows, w, k, ahead, out);
    case 3: return tile<3>(rows, w, k, ahead, out);
    case 4: return tile<4>(rows, w, k, ahead, out);
    case 5: return tile<5>(rows, w, k, ahead, out);
    default: return tile<6>(rows, w, k, ahead, out);
  }
}

struct Job {
  const uint16_t *x, *w13, *b13, *w2, *b2;
  const int32_t* pairs;   // t * K + k in expert order
  const int64_t* bounds;  // [E + 1]
  const float* scale;     // [T * K]
  int64_t tokens, top_k, hidden, width, experts;
  int64_t gate_first, gate_step, up_first, up_step;
  Activation act;
  uint16_t* h;  // [rows, width]
  float* sum;   // [tokens, hidden]
  uint16_t* out;
};

// `gate` and `up`: kTokens * width numbers each, of this thread alone.
void first_product(const Job& j, int64_t begin, int64_t end, float* gate, float* up) {
  float block[kTokens][kRows];
  for (int64_t e = 0; e < j.experts; ++e) {
    const uint16_t* w = j.w13 + e * 2 * j.width * j.hidden;
    const uint16_t* b = j.b13 ? j.b13 + e * 2 * j.width : nullptr;
    for (int64_t at = j.bounds[e]; at < j.bounds[e + 1]; at += kTokens) {
      const int count = int(std::min<int64_t>(kTokens, j.bounds[e + 1] - at));
      const uint16_t* rows[kTokens];
      for (int t = 0; t < count; ++t) rows[t] = j.x + (j.pairs[at + t] / j.top_k) * j.hidden;
      for (int64_t d = begin; d < end; d += 2) {
        int64_t index[kRows] = {j.gate_first + d * j.gate_step, j.gate_first + (d + 1) * j.gate_step,
                                j.up_first + d * j.up_step, j.up_first + (d + 1) * j.up_step};
        const uint16_t* weight[kRows];
        for (int r = 0; r < kRows; ++r) weight[r] = w + index[r] * j.hidden;
        tiles(count, rows, weight, j.hidden, 2 * j.gate_step * j.hidden, block);
        for (int t = 0; t < count; ++t) {
          for (int r = 0; r < kRows; ++r)
            if (b) block[t][r] += to_float(b[index[r]]);
          gate[t * j.width + d] = block[t][0], gate[t * j.width + d + 1] = block[t][1];
          up[t * j.width + d] = block[t][2], up[t * j.width + d + 1] = block[t][3];
        }
      }
      for (int t = 0; t < count; ++t)
        for (int64_t d = begin; d < end; d += 16) {
          __m512 value = activate(_mm512_loadu_ps(&gate[t * j.width + d]), _mm512_loadu_ps(&up[t * j.width + d]), j.act);
          _mm256_storeu_si256((__m256i*)(j.h + (at + t) * j.width + d), (__m256i)_mm512_cvtneps_pbh(value));
        }
    }
  }
}

void second_product(const Job& j, int64_t begin, int64_t end) {
  float block[kTokens][kRows];
  for (int64_t t = 0; t < j.tokens; ++t) std::fill(j.sum + t * j.hidden + begin, j.sum + t * j.hidden + end, 0.0f);
  for (int64_t e = 0; e < j.experts; ++e) {
    const uint16_t* w = j.w2 + e * j.hidden * j.width;
    const uint16_t* b = j.b2 ? j.b2 + e * j.hidden : nullptr;
    for (int64_t at = j.bounds[e]; at < j.bounds[e + 1]; at += kTokens) {
      const int count = int(std::min<int64_t>(kTokens, j.bounds[e + 1] - at));
      const uint16_t* rows[kTokens];
      for (int t = 0; t < count; ++t) rows[t] = j.h + (at + t) * j.width;
      for (int64_t c = begin; c < end; c += kRows) {
        const uint16_t* weight[kRows];
        for (int r = 0; r < kRows; ++r) weight[r] = w + (c + r) * j.width;
        tiles(count, rows, weight, j.width, kRows * j.width, block);
        for (int t = 0; t < count; ++t) {
          const int32_t pair = j.pairs[at + t];
          float* out = j.sum + (pair / j.top_k) * j.hidden + c;
          for (int r = 0; r < kRows; ++r) out[r] += j.scale[pair] * (block[t][r] + (b ? to_float(b[c + r]) : 0.0f));
        }
      }
    }
  }
  for (int64_t t = 0; t < j.tokens; ++t)
    for (int64_t c = begin; c < end; ++c) j.out[t * j.hidden + c] = to_bf16(j.sum[t * j.hidden + c]);
}

// [begin, end) of thread i, in steps of 16 columns.
std::pair<int64_t, int64_t> share(int64_t columns, int threads, int i) {
  const int64_t units = columns / 16;
  return {units * i / threads * 16, units * (i + 1) / threads * 16};
}

void run(Job job, const int64_t* ids, int64_t first, int threads) {
  const int64_t total = job.tokens * job.top_k, experts = job.experts;
  std::vector<int64_t> bounds(experts + 1, 0);
  for (int64_t i = 0; i < total; ++i)
    if (ids[i] >= first && ids[i] < first + experts) ++bounds[ids[i] - first + 1];
  for (int64_t e = 0; e < experts; ++e) bounds[e + 1] += bounds[e];
  std::vector<int64_t> next(bounds.begin(), bounds.end() - 1);
  std::vector<int32_t> pairs(bounds[experts]);
  for (int64_t i = 0; i < total; ++i)
    if (ids[i] >= first && ids[i] < first + experts) pairs[next[ids[i] - first]++] = int32_t(i);
  std::vector<uint16_t> h(bounds[experts] * job.width);
  std::vector<float> sum(job.tokens * job.hidden);
  // Of all threads, here: nothing could catch what a thread throws.
  const int64_t each = kTokens * job.width;
  std::vector<float> products(threads * 2 * each);
  job.pairs = pairs.data(), job.bounds = bounds.data(), job.h = h.data(), job.sum = sum.data();
  std::barrier meet(threads);
  auto work = [&](int i) {
    auto [a, b] = share(job.width, threads, i);
    first_product(job, a, b, &products[i * 2 * each], &products[(i * 2 + 1) * each]);
    meet.arrive_and_wait();
    auto [c, d] = share(job.hidden, threads, i);
    second_product(job, c, d);
  };
  std::vector<std::thread> others;
  others.reserve(threads - 1);
  try {
    for (int i = 1; i < threads; ++i) others.emplace_back(work, i);
  } catch (...) {
    (void)meet.arrive(threads - int(others.size()));  // for this thread and those that were not made, so that the others end
    for (auto& thread : others) thread.join();
    throw;
  }
  work(0);
  for (auto& thread : others) thread.join();
}

}  // namespace

// x [T, H], ids [T, K], scale [T, K], w13 [E, 2D, H], w2 [E, H, D], out [T, H]; H and D multiples of 32, all contiguous. An id outside
// [first, first + E) adds nothing. Gate row d of an expert is gate_first + d * gate_step, up row likewise.
// 0, or 1 when memory or threads are short.
extern "C" __attribute__((visibility("default"))) int moefx_experts_bf16(const uint16_t* x, const int64_t* ids, const float* scale, const uint16_t* w13, const uint16_t* b13,
                                   const uint16_t* w2, const uint16_t* b2, uint16_t* out, int64_t tokens, int64_t top_k, int64_t hidden,
                                   int64_t width, int64_t experts, int64_t first, const int64_t* rows, int clamp, float limit, float alpha,
                                   float beta, int threads) {
  Job job{x,      w13,     b13,     w2,      b2,      nullptr, nullptr, scale, tokens, top_k,
          hidden, width,   experts, rows[0], rows[1], rows[2], rows[3], {clamp, limit, alpha, beta},
          nullptr, nullptr, out};
  try {
    run(job, ids, first, threads);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  } catch (const std::system_error&) {
    return 1;
  }
}
