// Weights into panels of 64 columns, and back.
#pragma once

#include "quantise.h"
#include "plan.h"
#include "team.h"

namespace {

// Arguments of packing one tensor of weights [E, N, K], in 8-byte fields. Column `lane` of panel p is row gate_first + d * gate_step of
// the weights for the first half of a gated panel (d = 32 p + lane), up_first + d * up_step for the second; d and N end at `width`.
struct PackCall {
  const uint8_t* source;
  uint8_t* target;
  float* scales;
  int32_t* corrections;
  int64_t experts, width, inner, stride_e, stride_n, stride_k, type, format;
  int64_t gated, gate_first, gate_step, up_first, up_step, panels, steps, threads;
  void* gomp;
  int64_t unpack;

  int64_t row(int64_t panel, int lane) const {
    if (!gated) return panel * kPanel + lane < width ? panel * kPanel + lane : -1;
    const int64_t d = panel * (kPanel / 2) + lane % (kPanel / 2);
    if (d >= width) return -1;
    return lane < kPanel / 2 ? gate_first + d * gate_step : up_first + d * up_step;
  }
  int64_t offset(int64_t e, int64_t row, int64_t k) const { return e * stride_e + row * stride_n + k * stride_k; }
};

// T is an integer of the weights' size, G how many inner elements of a column lie together.
template <typename T, int G>
void copy_panel(const PackCall& c, int64_t e, int64_t panel) {
  T* packed = (T*)c.target + (e * c.panels + panel) * c.steps * G * kPanel;
  T* plain = (T*)c.source;
  constexpr int64_t kTile = 32;  // a cache line of bf16
  for (int64_t begin = 0; begin < c.steps * G; begin += kTile) {
    const int64_t end = std::min(begin + kTile, c.steps * G), inside = std::min(end, c.inner);
    for (int lane = 0; lane < kPanel; ++lane) {
      const int64_t row = c.row(panel, lane);
      T* at = packed + lane * G;
      const int64_t base = row < 0 ? 0 : c.offset(e, row, 0);
      if (c.unpack) {
        for (int64_t k = begin; row >= 0 && k < inside; ++k) plain[base + k * c.stride_k] = at[k / G * G * kPanel + k % G];
      } else {
        for (int64_t k = begin; k < end; ++k) at[k / G * G * kPanel + k % G] = row >= 0 && k < inside ? plain[base + k * c.stride_k] : T(0);
      }
    }
  }
}

// Where inner element k of column `lane` lies in an e4m3 panel: see E4m3Words.
inline int64_t e4m3_place(int64_t k, int lane) {
  const int in = lane % 32;
  return k / 2 * 128 + lane / 32 * 64 + in % 16 / 4 * 16 + in / 16 * 8 + in % 4 * 2 + k % 2;
}

inline uint8_t e4m3_code(float rounded) {
  const uint32_t bits = bits_of(rounded), magnitude = bits & 0x7fffffff;
  const uint32_t normal = magnitude > 0x7f800000 ? 127 : (magnitude >> 20) - (120 << 3);
  const uint32_t subnormal = uint32_t(int32_t(float_of_bits(magnitude < 0x3c800000u ? magnitude : 0) * 512.0f));
  return uint8_t((magnitude < 0x3c800000u ? subnormal : normal) | (bits >> 24 & 0x80));
}

// A block of 128 columns of gate or up (4 half panels) or of a matrix without a gate (2 panels), and one group of 128 inner elements.
inline void quantise_block(const PackCall& c, int64_t e, int64_t block, int64_t half, int64_t group) {
  const int64_t groups = (c.steps * 2 + kGroup - 1) / kGroup, wide = c.gated ? kPanel / 2 : kPanel, count = kGroup / wide;
  const int64_t begin = group * kGroup, padded = std::min<int64_t>(kGroup, c.steps * 2 - begin);
  const int64_t inside = std::min<int64_t>(padded, c.inner - begin);
  alignas(64) static thread_local float values[kGroup][kGroup];
  std::memset(values, 0, sizeof values);
  float most = 0.0f;
  for (int64_t j = 0; j < kGroup; ++j) {
    const int64_t panel = block * count + j / wide;
    const int64_t row = panel < c.panels ? c.row(panel, int(half * wide + j % wide)) : -1;
    if (row < 0) continue;
    const int64_t base = c.offset(e, row, begin), size = size_of(c.type);
    if (c.stride_k == 1) {
      to_floats(c.type, c.source + base * size, inside, values[j]);
    } else {
      for (int64_t k = 0; k < inside; ++k) values[j][k] = float_at(c.type, c.source, base + k * c.stride_k);
    }
    const float here = amax(values[j], inside);
    most = bits_of(here) > bits_of(most) ? here : most;
  }
  const float scale = scale_of(most, kE4m3Max);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t panel = block * count + i;
    if (panel >= c.panels) break;
    float* scales = c.scales + ((e * c.panels + panel) * groups + group) * 2;
    scales[half] = scale;
    if (!c.gated) scales[1] = scale;
    uint8_t* to = c.target + (e * c.panels + panel) * c.steps * 2 * kPanel + begin * kPanel;
    for (int64_t j = 0; j < wide; ++j) {
      uint8_t codes[kGroup];
      for (int64_t k = 0; k < kGroup; ++k) codes[k] = e4m3_code(round_e4m3(values[i * wide + j][k] / scale));
      for (int64_t k = 0; k < padded; ++k) to[e4m3_place(k, int(half * wide + j))] = codes[k];
    }
  }
}

inline void quantise_int8_panel(const PackCall& c, int64_t e, int64_t panel) {
  int8_t* packed = (int8_t*)c.target + (e * c.panels + panel) * c.steps * 4 * kPanel;
  std::vector<float> values(c.inner);
  for (int lane = 0; lane < kPanel; ++lane) {
    const int64_t row = c.row(panel, lane), column = (e * c.panels + panel) * kPanel + lane;
    if (row < 0) {
      std::fill(values.begin(), values.end(), 0.0f);
    } else if (c.stride_k == 1) {
      to_floats(c.type, c.source + c.offset(e, row, 0) * size_of(c.type), c.inner, values.data());
    } else {
      for (int64_t k = 0; k < c.inner; ++k) values[k] = float_at(c.type, c.source, c.offset(e, row, k));
    }
    const float scale = scale_of(amax(values.data(), c.inner), kInt8Max);
    int32_t sum = 0;
    for (int64_t k = 0; k < c.steps * 4; ++k) {
      const float value = k < c.inner ? std::nearbyint(values[k] / scale) : 0.0f;
      const int8_t code = int8_t(value >= -127.0f && value <= 127.0f ? value : 0.0f);
      packed[k / 4 * 4 * kPanel + lane * 4 + k % 4] = code;
      sum += code;
    }
    c.scales[column] = scale;
    c.corrections[column] = sum * 128;
  }
}

inline void pack_unit(const PackCall& c, int64_t unit) {
  if (c.format == kFp8) {
    const int64_t groups = (c.steps * 2 + kGroup - 1) / kGroup, halves = c.gated ? 2 : 1;
    const int64_t per = c.gated ? 4 : 2, blocks = (c.panels + per - 1) / per;
    for (int64_t half = 0; half < halves; ++half)
      for (int64_t g = 0; g < groups; ++g) quantise_block(c, unit / blocks, unit % blocks, half, g);
    return;
  }
  const int64_t e = unit / c.panels, panel = unit % c.panels;
  if (c.format == kWeightBf16) copy_panel<uint16_t, 2>(c, e, panel);
  if (c.format == kWeightF16) copy_panel<uint16_t, 1>(c, e, panel);
  if (c.format == kWeightF32) copy_panel<uint32_t, 1>(c, e, panel);
  if (c.format == kInt8) quantise_int8_panel(c, e, panel);
}

inline int64_t pack_units(const PackCall& c) {
  const int64_t per = c.format != kFp8 ? 1 : c.gated ? 4 : 2;
  return c.experts * ((c.panels + per - 1) / per);
}

}  // namespace
