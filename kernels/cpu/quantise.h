// Activations in 8 bit, quantised as they come.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace {

constexpr float kAmaxFloor = 1e-10f, kE4m3Max = 448.0f, kInt8Max = 127.0f;

// Largest magnitude; a NaN is larger than any number, as in torch's amax.
inline float amax(const float* values, int64_t count) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, bits_of(values[i]) & 0x7fffffff);
  return float_of_bits(most);
}

inline float scale_of(float most, float largest) { return (most < kAmaxFloor ? kAmaxFloor : most) / largest; }

// The nearest e4m3 number, ties to even, of |value| <= 448 (a NaN stays one).
inline float round_e4m3(float value) {
  const uint32_t bits = bits_of(value), sign = bits & 0x80000000u, magnitude = bits ^ sign;
  const uint32_t normal = (magnitude + 0x7ffff + ((magnitude >> 20) & 1)) & 0xfff00000u;
  const float small = float_of_bits(magnitude) + 16384.0f;  // the sum has steps of 2^-9
  const uint32_t subnormal = bits_of(small - 16384.0f);
  return float_of_bits((magnitude < 0x3c800000u ? subnormal : normal) | sign);
}

// Row [count] of fp32 -> e4m3 numbers, stored as `wide` says (bf16 or fp32, both exact), and a scale for each group. `to` may be where the
// row lies.
inline void quantise_groups(const float* row, int64_t count, int64_t group, bool wide, void* to, float* scales) {
  for (int64_t begin = 0, g = 0; begin < count; begin += group, ++g) {
    const int64_t size = std::min(group, count - begin);
    const float scale = scale_of(amax(row + begin, size), kE4m3Max);
    scales[g] = scale;
    float rounded[128];
    for (int64_t i = 0; i < size; ++i) rounded[i] = round_e4m3(row[begin + i] / scale);
    if (wide) std::memcpy((float*)to + begin, rounded, size * 4);
    if (!wide)
      for (int64_t i = 0; i < size; ++i) ((uint16_t*)to)[begin + i] = uint16_t(bits_of(rounded[i]) >> 16);
  }
}

// Row [count] of fp32 -> int8 plus 128 as a byte, and its scale. `to` may be where the row lies.
inline void quantise_row(const float* row, int64_t count, uint8_t* to, float* scale) {
  *scale = scale_of(amax(row, count), kInt8Max);
  for (int64_t i = 0; i < count; ++i) {
    const float value = std::nearbyint(row[i] / *scale);
    to[i] = uint8_t(int32_t(value >= -127.0f && value <= 127.0f ? value : 0.0f) + 128);
  }
}

}  // namespace
