// The inner loop of both products: up to 6 token rows times one or two panels of 64 weight columns, accumulated in registers.
//
// A panel holds its columns step by step of the inner dimension. A `Step` says how many inner elements a step has (`depth`), how many
// bytes of the panel (`bytes`), and how one step is multiplied in.
#pragma once

#include "simd.h"

namespace {

constexpr int kPanel = 64;
constexpr int kRows = 6;

// Lines to fetch while a tile runs: `lines` of 64 bytes per step and panel, from `here[panel]` until step `split`, then from `next[panel]`.
// Both are where step 0 would fetch.
struct Prefetch {
  const uint8_t* here[2] = {nullptr, nullptr};
  const uint8_t* next[2] = {nullptr, nullptr};
  int64_t split = 0;
  int lines = 0;
};

struct TileTask {
  const uint8_t* rows[kRows];  // where step 0 of each token row lies
  const uint8_t* w[2];         // where step 0 of each panel lies
  int64_t steps;
  float* sums;  // [rows][stride]; the second panel's columns follow the first's
  int64_t stride;
  bool fresh;  // start from zero, not from what `sums` holds
  // With `group` > 0: every so many steps, sums += product * row_scales[row][group] * panel_scales[panel][group][half of the panel].
  int64_t group;
  const float* row_scales[kRows];  // null: 1
  const float* panel_scales[2];
  Prefetch prefetch;
};

// sums (+)= products of group `g` by its scales.
template <class Step, int R, int V>
void write_scaled(const TileTask& task, const typename Step::Sum (&sums)[R][V], int64_t g, int first) {
  constexpr int kHalf = kPanel / 2;
  for (int r = 0; r < R; ++r) {
    const float row = task.row_scales[r] ? task.row_scales[r][g] : 1.0f;
    float factor[4];
#pragma GCC unroll 4
    for (int half = 0; half < 4; ++half) factor[half] = row * task.panel_scales[half / 2][g * 2 + half % 2];
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) {
      const int column = first + j * Step::kWidth;
      float* at = task.sums + r * task.stride + column;
      const Vec scale = splat(factor[column / kHalf]);
      store(at, task.fresh && g == 0 ? mul(sums[r][j], scale) : fma(sums[r][j], scale, load(at)));
    }
  }
}

// V vectors of columns from column `first` of the panels on.
template <class Step, int R, int V>
void tile(const TileTask& t, int first) {
  constexpr int kWidth = Step::kWidth;  // columns of a vector
  constexpr int kPanels = V * kWidth > kPanel ? 2 : 1;
  const TileTask task = t;
  const int64_t group = task.group ? task.group : task.steps;
  for (int64_t i = 0, g = 0; i < task.steps; ++g) {
    typename Step::Sum sums[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int j = 0; j < V; ++j) {
        const bool zero = task.fresh || task.group;
        sums[r][j] = zero ? Step::none() : Step::read(task.sums + r * task.stride + first + j * kWidth);
      }
    const int64_t until = i + group < task.steps ? i + group : task.steps;
    for (int part = 0; part < 2; ++part) {
      const uint8_t* const* from = part ? task.prefetch.next : task.prefetch.here;
      const int64_t end = part || until < task.prefetch.split ? until : task.prefetch.split;
      for (; i < end; ++i) {
        for (int l = 0; l < task.prefetch.lines; ++l)
#pragma GCC unroll 2
          for (int p = 0; p < kPanels; ++p) _mm_prefetch((const char*)(from[p] + (i * task.prefetch.lines + l) * 64), _MM_HINT_T0);
        Step::template multiply<R, V>(sums, task.rows, task.w, i, first);
      }
    }
    if constexpr (Step::kScaled) {
      if (task.group) {
        write_scaled<Step, R, V>(task, sums, g, first);
        continue;
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int j = 0; j < V; ++j) Step::write(task.sums + r * task.stride + first + j * kWidth, sums[r][j]);
  }
}

template <class Step, int V>
void tile_of(int rows, const TileTask& t, int first) {
  constexpr int kMost = Step::kSums / V < kRows ? Step::kSums / V : kRows;  // what registers hold
  switch (rows) {
    case 1: return tile<Step, 1, V>(t, first);
    case 2: if constexpr (kMost >= 2) return tile<Step, 2, V>(t, first); break;
    case 3: if constexpr (kMost >= 3) return tile<Step, 3, V>(t, first); break;
    case 4: if constexpr (kMost >= 4) return tile<Step, 4, V>(t, first); break;
    case 5: if constexpr (kMost >= 5) return tile<Step, 5, V>(t, first); break;
    default: if constexpr (kMost >= 6) return tile<Step, 6, V>(t, first); break;
  }
}

// Whole panels (1 or 2) by as many tiles as the registers ask for.
template <class Step>
void panels_tile(int rows, int panels, const TileTask& t) {
  if constexpr (Step::kWidth == 16) {
    return panels == 2 ? tile_of<Step, 8>(rows, t, 0) : tile_of<Step, 4>(rows, t, 0);
  } else {
    TileTask later = t;
    later.prefetch.lines = 0;
    if (rows == 1) return tile_of<Step, 8>(rows, t, 0);
    const int width = rows <= 3 ? 4 : 2;
    for (int first = 0; first < kPanel; first += width * Step::kWidth) {
      if (width == 4) tile_of<Step, 4>(rows, first ? later : t, first);
      if (width == 2) tile_of<Step, 2>(rows, first ? later : t, first);
    }
  }
}

}  // namespace
