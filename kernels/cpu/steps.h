// How one step of a panel is multiplied in, for every storage of weights and every instruction set.
#pragma once

#include "tile.h"

namespace {

inline int32_t word_at(const uint8_t* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

// Products in fp32: the rows are fp32, `Weight::at` gives a vector of weights of inner element k of a step.
template <class Weight>
struct FloatStep {
  using Sum = Vec;
  static constexpr int kWidth = kLanes, kSums = kLanes == 16 ? 24 : 12;
  static constexpr int64_t depth = Weight::depth, bytes = Weight::bytes, row_bytes = depth * 4;
  static constexpr bool kScaled = true;
  static Sum none() { return zero(); }
  static Sum read(const float* p) { return load(p); }
  static void write(float* p, Sum v) { store(p, v); }

  template <int R, int V>
  static void multiply(Sum (&sums)[R][V], const TileTask& task, int64_t i, int first) {
    constexpr int kGroup = kLanes == 16 ? (V < 4 ? V : 4) : (V < 2 ? V : 2);  // weights in registers at a time
#pragma GCC unroll 4
    for (int j = 0; j < V; j += kGroup)
#pragma GCC unroll 2
      for (int k = 0; k < depth; ++k) {
        Vec weight[kGroup];
#pragma GCC unroll 4
        for (int g = 0; g < kGroup; ++g) {
          const int column = first + (j + g) * kWidth;
          weight[g] = Weight::at(task.w + i * bytes, column, k);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const Vec x = splat(((const float*)task.rows[r])[i * depth + k]);
#pragma GCC unroll 4
          for (int g = 0; g < kGroup; ++g) sums[r][j + g] = fma(x, weight[g], sums[r][j + g]);
        }
      }
  }
};

struct Bf16Pairs {
  static constexpr int64_t depth = 2, bytes = kPanel * 4;
  static Vec at(const uint8_t* step, int column, int k) {
#ifdef __AVX512F__
    const __m512i pair = _mm512_loadu_si512(step + column * 4);
    return _mm512_castsi512_ps(k ? _mm512_and_si512(pair, _mm512_set1_epi32(int(0xffff0000))) : _mm512_slli_epi32(pair, 16));
#else
    const __m256i pair = _mm256_loadu_si256((const __m256i*)(step + column * 4));
    return _mm256_castsi256_ps(k ? _mm256_and_si256(pair, _mm256_set1_epi32(int(0xffff0000))) : _mm256_slli_epi32(pair, 16));
#endif
  }
};

struct F16Singles {
  static constexpr int64_t depth = 1, bytes = kPanel * 2;
  static Vec at(const uint8_t* step, int column, int) { return from_f16((const uint16_t*)step + column); }
};

struct F32Singles {
  static constexpr int64_t depth = 1, bytes = kPanel * 4;
  static Vec at(const uint8_t* step, int column, int) { return load((const float*)step + column); }
};

#ifdef __AVX512BF16__

// Products by instructions that take a 32-bit word of several inner elements from either side: 16 columns a vector. With kKeeps the words
// of weights, as they are multiplied, are kept for other rows.
template <class Words, bool kKeeps = false>
struct WordStep {
  using Sum = typename Words::Sum;
  static constexpr int kWidth = 16, kSums = 24;
  static constexpr int64_t depth = Words::depth, bytes = Words::bytes, row_bytes = 4;
  static constexpr bool kScaled = Words::kScaled;
  static Sum none() { return (Sum)_mm512_setzero_si512(); }
  static Sum read(const float* p) { return (Sum)_mm512_loadu_si512(p); }
  static void write(float* p, Sum v) { _mm512_storeu_si512(p, (__m512i)v); }

  template <int R, int V>
  static void multiply(Sum (&sums)[R][V], const TileTask& task, int64_t i, int) {
    static_assert(V == 4);
    __m512i weight[4];
    Words::template load<R * V>(task.w + i * bytes, weight);
    if constexpr (kKeeps)
      for (int g = 0; g < 4; ++g) _mm512_store_si512(task.decoded + i * 256 + g * 64, weight[g]);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512i x = _mm512_set1_epi32(word_at(task.rows[r] + i * 4));
#pragma GCC unroll 4
      for (int g = 0; g < 4; ++g) sums[r][g] = Words::dot(sums[r][g], x, weight[g]);
    }
  }
};

struct Bf16Words {
  using Sum = __m512;
  static constexpr int64_t depth = 2, bytes = kPanel * 4;
  static constexpr bool kScaled = true;
  template <int Sums>
  static void load(const uint8_t* step, __m512i (&weight)[4]) {
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) weight[g] = _mm512_loadu_si512(step + g * 64);
  }
  static Sum dot(Sum sum, __m512i x, __m512i weight) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)weight); }
};

// bf16 of the 128 magnitudes of e4m3, low and high bytes.
struct E4m3Table {
  alignas(64) uint8_t low[128], high[128];
  constexpr E4m3Table() : low(), high() {
    for (int code = 0; code < 128; ++code) {
      const int exponent = code >> 3, mantissa = code & 7;
      int bits = ((exponent + 120) << 7) | (mantissa << 4);
      if (exponent == 0) {  // mantissa * 2^-9, normal in bf16
        int top = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;
        bits = mantissa ? ((127 - 9 + top) << 7) | ((mantissa << (7 - top)) & 0x7f) : 0;
      }
      if (code == 127) bits = 0x7fc0;
      low[code] = uint8_t(bits), high[code] = uint8_t(bits >> 8);
    }
  }
};
constexpr E4m3Table e4m3_table{};

// e4m3 bytes, turned into bf16 exactly by a table of the 128 magnitudes; laid out so that interleaving low and high bytes of the table's
// answers puts the columns in order.
struct E4m3Words {
  using Sum = __m512;
  static constexpr int64_t depth = 2, bytes = kPanel * 2;
  static constexpr bool kScaled = true;

  template <int Sums>
  static void load(const uint8_t* step, __m512i (&weight)[4]) {
    const E4m3Table* table = &e4m3_table;
    // Beside so many sums no registers are left for the table: keep its loads in the loop.
    if constexpr (Sums > 16) asm("" : "+r"(table));
    const __m512i low0 = _mm512_load_si512(table->low), low1 = _mm512_load_si512(table->low + 64);
    const __m512i high0 = _mm512_load_si512(table->high), high1 = _mm512_load_si512(table->high + 64);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m512i codes = _mm512_loadu_si512(step + half * 64);
      const __m512i low = _mm512_permutex2var_epi8(low0, codes, low1);
      __m512i high = _mm512_permutex2var_epi8(high0, codes, high1);
      high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(char(0x80)), 0xf8);  // high | (codes & sign)
      weight[half * 2] = _mm512_unpacklo_epi8(low, high);
      weight[half * 2 + 1] = _mm512_unpackhi_epi8(low, high);
    }
  }
  static Sum dot(Sum sum, __m512i x, __m512i weight) { return Bf16Words::dot(sum, x, weight); }
};

// Rows are unsigned (the value plus 128), weights signed; sums are exact.
struct Int8Words {
  using Sum = __m512i;
  static constexpr int64_t depth = 4, bytes = kPanel * 4;
  static constexpr bool kScaled = false;
  template <int Sums>
  static void load(const uint8_t* step, __m512i (&weight)[4]) {
    Bf16Words::load<Sums>(step, weight);
  }
  static Sum dot(Sum sum, __m512i x, __m512i weight) { return _mm512_dpbusd_epi32(sum, x, weight); }
};

#endif

}  // namespace
