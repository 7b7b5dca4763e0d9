// The product of some token rows with one or two panels of an expert's weights.
#pragma once

#include "steps.h"

namespace {

constexpr int kMostRows = 192;       // rows of one block: they and a slice of a panel stay in the L2 cache
constexpr int kGroup = 128;          // inner elements that share an FP8 scale
constexpr int64_t kSlice = 1024;     // inner elements of a panel that several row tiles pass over
constexpr int64_t kAhead = 8192;     // bytes of a panel fetched ahead of their use when they are used once

struct Product {
  const uint8_t* const* rows;  // [count]
  int count;
  const uint8_t* w;  // the first panel
  int64_t panel_bytes;
  int panels;  // 1 or 2
  int64_t steps;
  float* sums;  // [count][stride]
  int64_t stride;
  const uint8_t* next;  // panels that this thread will take next, or null
  int next_panels;
  int64_t next_bytes;
  // FP8 only: scales of the rows ([count] pointers to one for each group, or null) and of the panels ([groups][2] each, `groups` apart).
  const float* const* row_scales;
  const float* panel_scales;
  int64_t groups;
};

// Rows [from, from + count) and the panels from `panel` on, of inner elements from group `g` of scales on when there are scales.
template <class Step>
TileTask tile_task(const Product& p, int panel, int from, int count, int64_t g = 0) {
  TileTask t;
  t.w[0] = p.w + panel * p.panel_bytes;
  t.w[1] = t.w[0] + p.panel_bytes;
  t.steps = p.steps;
  t.sums = p.sums + from * p.stride + panel * kPanel;
  t.stride = p.stride;
  t.fresh = g == 0;
  for (int r = 0; r < count; ++r) t.rows[r] = p.rows[from + r];
  t.group = p.panel_scales ? kGroup / Step::depth : 0;
  if (p.panel_scales) {
    for (int r = 0; r < count; ++r) t.row_scales[r] = p.row_scales ? p.row_scales[from + r] + g : nullptr;
    for (int i = 0; i < 2; ++i) t.panel_scales[i] = p.panel_scales + ((panel + i < p.panels ? panel + i : panel) * p.groups + g) * 2;
  }
  return t;
}

// Weights used once: fetch a fixed distance ahead, at the end from where the thread goes on.
template <class Step>
void fetch_ahead(const Product& p, int panel, int panels, TileTask& t) {
  const int64_t ahead = kAhead / panels / Step::bytes;
  t.prefetch.lines = int(Step::bytes / 64);
  t.prefetch.split = t.steps > ahead ? t.steps - ahead : 0;
  for (int i = 0; i < panels; ++i) {
    t.prefetch.here[i] = t.w[i] + ahead * Step::bytes;
    const bool within = panel + panels < p.panels;
    const uint8_t* next = within ? t.w[i] + p.panel_bytes : p.next ? p.next + (i < p.next_panels ? i : 0) * p.next_bytes : t.w[i];
    t.prefetch.next[i] = next - t.prefetch.split * Step::bytes;
  }
}

// Fetches the next panels bit by bit while row tiles pass over this one.
class Fetcher {
 public:
  Fetcher(const Product& p, int panel, int64_t total_steps) {
    const bool within = panel + 1 < p.panels;
    at_ = within ? p.w + (panel + 1) * p.panel_bytes : p.next;
    const int64_t bytes = !at_ ? 0 : within ? p.panel_bytes : p.next_bytes;
    left_ = bytes / 64;
    lines_ = int((left_ + total_steps - 1) / (total_steps > 0 ? total_steps : 1));
  }
  void put(TileTask& t) {
    const int64_t most = lines_ ? left_ / lines_ : 0;
    t.prefetch.lines = most > 0 ? lines_ : 0;
    t.prefetch.split = t.steps;
    t.prefetch.here[0] = at_;
    const int64_t steps = most < t.steps ? most : t.steps;
    if (steps < t.steps) {  // the rest of the steps fetch what was fetched
      t.prefetch.split = steps;
      t.prefetch.next[0] = at_ - steps * lines_ * 64;
    }
    at_ += steps * lines_ * 64, left_ -= steps * lines_;
  }

 private:
  const uint8_t* at_;
  int64_t left_;
  int lines_;
};

template <class Step>
void product(const Product& p) {
  if constexpr (Step::kWidth == 16) {
    if (p.panels == 2 && p.count <= 3) {
      TileTask t = tile_task<Step>(p, 0, 0, p.count);
      fetch_ahead<Step>(p, 0, 2, t);
      return panels_tile<Step>(p.count, 2, t);
    }
  }
  const int tiles = (p.count + kRows - 1) / kRows;
  const int64_t slice = tiles == 1 ? p.steps : kSlice / Step::depth;
  for (int panel = 0; panel < p.panels; ++panel) {
    Fetcher fetcher(p, panel, p.steps * tiles);
    for (int64_t begin = 0; begin < p.steps; begin += slice)
      for (int i = 0; i < tiles; ++i) {
        const int from = p.count * i / tiles, count = p.count * (i + 1) / tiles - from;
        TileTask t = tile_task<Step>(p, panel, from, count);
        t.w[0] += begin * Step::bytes;
        t.steps = p.steps - begin < slice ? p.steps - begin : slice;
        t.fresh = begin == 0;
        for (int r = 0; r < count; ++r) t.rows[r] += begin * Step::row_bytes;
        if (tiles == 1) fetch_ahead<Step>(p, panel, 1, t);
        if (tiles > 1) fetcher.put(t);
        panels_tile<Step>(count, 1, t);
      }
  }
}

#ifdef __AVX512BF16__

// FP8: a scale for every group of 128 inner elements. Of several row tiles, the first decodes a group of weights for all.
inline void product_fp8(const Product& p, uint8_t* decoded) {
  constexpr int64_t kSteps = kGroup / 2;
  using First = WordStep<E4m3Words, true>;
  using Later = WordStep<Bf16Words>;
  const int tiles = (p.count + kRows - 1) / kRows;
  if (tiles == 1) return product<WordStep<E4m3Words>>(p);
  for (int panel = 0; panel < p.panels; ++panel) {
    Fetcher fetcher(p, panel, p.steps * tiles);
    for (int64_t g = 0; g < p.groups; ++g) {
      const int64_t begin = g * kSteps;
      for (int i = 0; i < tiles; ++i) {
        const int from = p.count * i / tiles, count = p.count * (i + 1) / tiles - from;
        TileTask t = tile_task<Later>(p, panel, from, count, g);
        t.w[0] = i ? decoded : t.w[0] + begin * First::bytes;
        t.decoded = decoded;
        t.steps = p.steps - begin < kSteps ? p.steps - begin : kSteps;
        for (int r = 0; r < count; ++r) t.rows[r] += begin * Later::row_bytes;
        fetcher.put(t);
        if (i == 0) panels_tile<First>(count, 1, t);
        if (i > 0) panels_tile<Later>(count, 1, t);
      }
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
  const int tiles = (p.count + kRows - 1) / kRows;
  for (int panel = 0; panel < p.panels; ++panel) {
    Fetcher fetcher(p, panel, p.steps * 2 * tiles);
    for (int64_t g = 0; g < p.groups; ++g) {
      const int64_t begin = g * kSteps, steps = p.steps - begin < kSteps ? p.steps - begin : kSteps;
      decode_group(p.w + panel * p.panel_bytes + begin * kBytes, steps, (float*)decoded);
      for (int i = 0; i < tiles; ++i) {
        const int from = p.count * i / tiles, count = p.count * (i + 1) / tiles - from;
        TileTask t = tile_task<Step>(p, panel, from, count, g);
        t.w[0] = decoded;
        t.steps = steps * 2;
        for (int r = 0; r < count; ++r) t.rows[r] += begin * 2 * Step::row_bytes;
        fetcher.put(t);
        panels_tile<Step>(count, 1, t);
      }
    }
  }
}

#endif

}  // namespace
