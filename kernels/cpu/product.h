// The product of some token rows with a panel of an expert's weights.
//
// Weights are read in order, which the processor's own prefetchers follow. Fetching them by instructions is slower, except where
// several row tiles pass over them, and reading would stop meanwhile.
#pragma once

#include "steps.h"

namespace {

constexpr int kMostRows = 192;    // rows of one block: they and a slice of a panel stay in the L2 cache
constexpr int kGroup = 128;       // inner elements that share an FP8 scale
constexpr int kManyTiles = 4;     // from so many row tiles on, products take longer than reading the weights
constexpr int64_t kSlice = 1024;  // inner elements of a panel that several row tiles pass over

struct Product {
  const uint8_t* const* rows;  // [count]
  int count;
  const uint8_t* w;
  int64_t steps;
  float* sums;  // [count][stride]
  int64_t stride;
  // FP8 only: scales of the rows ([count] pointers to one for each group, or null) and of the panel ([groups][2]).
  const float* const* row_scales;
  const float* panel_scales;
  int64_t groups;
};

// Rows of tile `i` of `tiles`, of inner elements from group `g` of scales on when there are scales.
template <class Step>
int begin_tile(const Product& p, int i, int tiles, int64_t g, TileTask& t) {
  const int from = p.count * i / tiles, count = p.count * (i + 1) / tiles - from;
  t.w = p.w;
  t.steps = p.steps;
  t.sums = p.sums + from * p.stride;
  t.stride = p.stride;
  t.fresh = g == 0;
  t.fetch_lines = 0;
  for (int r = 0; r < count; ++r) t.rows[r] = p.rows[from + r];
  t.group = p.panel_scales ? kGroup / Step::depth : 0;
  if (p.panel_scales) {
    for (int r = 0; r < count; ++r) t.row_scales[r] = p.row_scales ? p.row_scales[from + r] + g : nullptr;
    t.panel_scales = p.panel_scales + g * 2;
  }
  return count;
}

inline int tiles_of(const Product& p) { return (p.count + kRows - 1) / kRows; }

template <class Step>
void product(const Product& p) {
  const int tiles = tiles_of(p), lines = (int(Step::bytes / 64) + tiles - 1) / tiles;
  const int64_t slice = tiles == 1 ? p.steps : kSlice / Step::depth, bytes = p.steps * Step::bytes;
  const uint8_t* next = p.w + bytes;  // the next panel, as a rule
  for (int64_t begin = 0; begin < p.steps; begin += slice)
    for (int i = 0; i < tiles; ++i) {
      TileTask t;
      const int count = begin_tile<Step>(p, i, tiles, 0, t);
      t.w += begin * Step::bytes;
      t.steps = std::min(p.steps - begin, slice);
      t.fresh = begin == 0;
      for (int r = 0; r < count; ++r) t.rows[r] += begin * Step::row_bytes;
      const int64_t fetched = t.steps * lines * 64;
      if (tiles >= kManyTiles && next + fetched <= p.w + 2 * bytes) {
        t.fetch = next, t.fetch_lines = lines;
        next += fetched;
      }
      panel_tile<Step>(count, t);
    }
}

#ifdef __AVX512BF16__

// FP8: a scale for every group of 128 inner elements. Of several row tiles, the first decodes a group of weights for all. The first
// two fetch the next group meanwhile: reading stops too often for the processor to see that it goes on.
inline void product_fp8(const Product& p, uint8_t* decoded) {
  constexpr int64_t kSteps = kGroup / 2;
  using First = WordStep<E4m3Words, true>;
  using Later = WordStep<Bf16Words>;
  const int tiles = tiles_of(p);
  if (tiles == 1) return product<WordStep<E4m3Words>>(p);
  for (int64_t g = 0; g < p.groups; ++g) {
    const int64_t begin = g * kSteps;
    const uint8_t *codes = p.w + begin * First::bytes, *next = codes + kSteps * First::bytes;
    for (int i = 0; i < tiles; ++i) {
      TileTask t;
      const int count = begin_tile<Later>(p, i, tiles, g, t);
      t.w = i ? decoded : codes;
      t.decoded = decoded;
      t.steps = std::min(p.steps - begin, kSteps);
      for (int r = 0; r < count; ++r) t.rows[r] += begin * Later::row_bytes;
      if (i < 2) t.fetch = next + i * kSteps * 64, t.fetch_lines = 1;
      if (i == 0) panel_tile<First>(count, t);
      if (i > 0) panel_tile<Later>(count, t);
    }
  }
}

#else

// One group of a panel of e4m3 codes -> fp32.
inline void decode_group(const uint8_t* codes, int64_t steps, float* to) {
  static const struct Values {
    float of[256];
    Values() {
      for (int code = 0; code < 256; ++code) {
        const int exponent = (code >> 3) & 15, mantissa = code & 7;
        float value = exponent ? float(8 + mantissa) * float(1 << exponent) / 1024.0f : float(mantissa) / 512.0f;
        if ((code & 127) == 127) value = float_of_bits(0x7fc00000);
        of[code] = code & 128 ? -value : value;
      }
    }
  } values;
  for (int64_t i = 0; i < steps * 2; ++i)
    for (int lane = 0; lane < kPanel; ++lane) {
      const int in = lane % 32, column = (in % 16) / 4 * 16 + (in / 16) * 8 + in % 4 * 2;
      to[i * kPanel + lane] = values.of[codes[(i / 2) * 128 + lane / 32 * 64 + column + i % 2]];
    }
}

// FP8: a scale for every group of 128 inner elements; weights are decoded once for all row tiles.
inline void product_fp8(const Product& p, uint8_t* decoded) {
  constexpr int64_t kSteps = kGroup / 2, kBytes = kPanel * 2;
  using Step = FloatStep<F32Singles>;
  const int tiles = tiles_of(p);
  for (int64_t g = 0; g < p.groups; ++g) {
    const int64_t begin = g * kSteps, steps = std::min(p.steps - begin, kSteps);
    decode_group(p.w + begin * kBytes, steps, (float*)decoded);
    for (int i = 0; i < tiles; ++i) {
      TileTask t;
      const int count = begin_tile<Step>(p, i, tiles, g, t);
      t.w = decoded;
      t.steps = steps * 2;
      for (int r = 0; r < count; ++r) t.rows[r] += begin * 2 * Step::row_bytes;
      panel_tile<Step>(count, t);
    }
  }
}

#endif

}  // namespace
