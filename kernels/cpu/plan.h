// What one call has to do: token rows sorted by expert, cut into blocks of rows, and the order of the work.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "product.h"

namespace {

struct Call {
  const void *x, *ids, *scale;
  void* out;
  const uint8_t* w13;
  const float* s13;
  const int32_t* c13;
  const float* b13;
  const uint8_t* w2;
  const float* s2;
  const int32_t* c2;
  const float* b2;
  int64_t tokens, top_k, hidden, experts, first;
  int64_t panels13, steps13, panels2, steps2;
  int64_t format, x_type, ids_int32, scale_type;
  int64_t kind, clamp, gated, threads;
  void* gomp;
  double limit, alpha, beta;
};

enum Format : int64_t { kWeightBf16 = 0, kWeightF16 = 1, kWeightF32 = 2, kFp8 = 3, kFp8WeightOnly = 4, kInt8 = 5 };

// Rows [begin, begin + count) of the sorted rows, all of one expert.
struct Block {
  int64_t expert, begin;
  int count;
};

struct Sorted {
  std::vector<int32_t> position;  // of pair t * K + k among the sorted rows; -1 when its expert is not here
  std::vector<int32_t> token;     // of a sorted row
  std::vector<Block> blocks;

  explicit Sorted(const Call& c) {
    const int64_t total = c.tokens * c.top_k;
    std::vector<int64_t> bounds(c.experts + 1, 0);
    position.resize(total);
    for (int64_t i = 0; i < total; ++i) {
      const int64_t id = (c.ids_int32 ? ((const int32_t*)c.ids)[i] : ((const int64_t*)c.ids)[i]) - c.first;
      position[i] = id >= 0 && id < c.experts ? int32_t(id) : -1;
      if (position[i] >= 0) ++bounds[id + 1];
    }
    for (int64_t e = 0; e < c.experts; ++e) bounds[e + 1] += bounds[e];
    for (int64_t e = 0; e < c.experts; ++e) {
      const int64_t rows = bounds[e + 1] - bounds[e], parts = (rows + kMostRows - 1) / kMostRows;
      for (int64_t i = 0; i < parts; ++i) {
        const int64_t from = rows * i / parts, to = rows * (i + 1) / parts;
        blocks.push_back({e, bounds[e] + from, int(to - from)});
      }
    }
    token.resize(bounds[c.experts]);
    for (int64_t i = 0; i < total; ++i) {
      if (position[i] < 0) continue;
      position[i] = int32_t(bounds[position[i]]++);
      token[position[i]] = int32_t(i / c.top_k);
    }
  }
};

// The order of the work. Every item depends only on items before it, and threads take them in order, so none waits for ever:
//   prepare rows of x | first product of every block | for each slice of the output's columns: second product of every block, combine
struct Order {
  int64_t prepare, per_block13, first, slices, slice_panels, per_block2, second, combine, total;
  int64_t chunk13, chunk2;    // panels of an item
  int64_t combine_columns, combine_units, units_an_item;  // a unit of combining is one token's piece of columns

  Order(const Call& c, int64_t blocks, int64_t rows, bool prepares) {
    const int64_t threads = std::max<int64_t>(c.threads, 1);
    prepare = prepares ? std::min<int64_t>(c.tokens, threads * 4) : 0;
    // Long items cost less around them; each thread should still have several, so that none waits for another at the end.
    const auto chunk = [&](int64_t panels, int64_t most) {
      return std::clamp<int64_t>(blocks * panels / (8 * threads), 1, most);
    };
    chunk13 = chunk(c.panels13, 8);
    per_block13 = (c.panels13 + chunk13 - 1) / chunk13;
    first = blocks * per_block13;
    constexpr int64_t kSliceBytes = int64_t(8) << 20;  // products of a slice stay in the L3 cache until they are combined
    slice_panels = rows ? std::clamp<int64_t>(kSliceBytes / (rows * kPanel * 4), 1, c.panels2) : c.panels2;
    slices = (c.panels2 + slice_panels - 1) / slice_panels;
    chunk2 = chunk(slice_panels, std::min<int64_t>(slice_panels, 16));
    per_block2 = (slice_panels + chunk2 - 1) / chunk2;
    second = blocks * per_block2;
    combine_columns = std::min<int64_t>(slice_panels * kPanel, 512);
    combine_units = c.tokens * ((slice_panels * kPanel + combine_columns - 1) / combine_columns);
    units_an_item = std::max<int64_t>(1, combine_units / (threads * 8));
    combine = (combine_units + units_an_item - 1) / units_an_item;
    total = prepare + first + slices * (second + combine);
  }
};

}  // namespace
