// Vectors of floats of the instruction set this file is compiled for, and the element types of tensors.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

#ifdef __AVX512F__
using Vec = __m512;
constexpr int kLanes = 16;
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec splat(float v) { return _mm512_set1_ps(v); }
inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec absolute(Vec a) { return _mm512_abs_ps(a); }
inline Vec nearest(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) { return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), yes); }
inline Vec from_int(const int32_t* p) { return _mm512_cvtepi32_ps(_mm512_loadu_si512(p)); }
inline Vec from_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline Vec from_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline void to_f16(uint16_t* p, Vec v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// x * 2^n; overflows to infinity.
inline Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
#else
using Vec = __m256;
constexpr int kLanes = 8;
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec splat(float v) { return _mm256_set1_ps(v); }
inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec absolute(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline Vec nearest(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
inline Vec from_int(const int32_t* p) { return _mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline Vec from_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline Vec from_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline void to_f16(uint16_t* p, Vec v) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// x * 2^n in two steps, since 2^n alone may leave the range of floats; overflows to infinity.
inline Vec scale_by_power(Vec x, Vec n) {
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), bias = _mm256_set1_epi32(127);
  const __m256i rest = _mm256_sub_epi32(whole, half);
  x = _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}
#endif

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// To the nearest bf16, ties to even; a NaN stays one.
inline uint16_t bf16_of(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void to_bf16(uint16_t* p, Vec v) {
#ifdef __AVX512BF16__
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(v));
#else
  alignas(64) float values[kLanes];
  store(values, v);
  for (int i = 0; i < kLanes; ++i) p[i] = bf16_of(values[i]);
#endif
}

enum Type : int64_t { kBf16 = 0, kF16 = 1, kF32 = 2 };

inline int64_t size_of(int64_t type) { return type == kF32 ? 4 : 2; }

inline float float_at(int64_t type, const void* base, int64_t i) {
  if (type == kF32) return ((const float*)base)[i];
  const uint16_t raw = ((const uint16_t*)base)[i];
  return type == kBf16 ? float_of_bits(uint32_t(raw) << 16) : _cvtsh_ss(raw);
}

inline void put_float(int64_t type, void* base, int64_t i, float value) {
  if (type == kF32) ((float*)base)[i] = value;
  if (type == kBf16) ((uint16_t*)base)[i] = bf16_of(value);
  if (type == kF16) ((uint16_t*)base)[i] = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
}

inline void to_floats(int64_t type, const void* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    if (type == kF32) store(to + i, load((const float*)from + i));
    if (type == kBf16) store(to + i, from_bf16((const uint16_t*)from + i));
    if (type == kF16) store(to + i, from_f16((const uint16_t*)from + i));
  }
  for (; i < count; ++i) to[i] = float_at(type, from, i);
}

inline void put(int64_t type, void* base, int64_t i, Vec v) {
  if (type == kF32) store((float*)base + i, v);
  if (type == kBf16) to_bf16((uint16_t*)base + i, v);
  if (type == kF16) to_f16((uint16_t*)base + i, v);
}

}  // namespace
