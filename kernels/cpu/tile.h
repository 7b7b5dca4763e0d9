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
  uint8_t* decoded;  // where a step that keeps its weights puts them
  Prefetch prefetch;
};

// The factors of group `g`: of every row, for each half of each panel.
template <int R>
void factors(const TileTask& task, int64_t g, float (&out)[R][4]) {
  for (int r = 0; r < R; ++r) {
    const float row = task.row_scales[r] ? task.row_scales[r][g] : 1.0f;
    for (int half = 0; half < 4; ++half) out[r][half] = row * task.panel_scales[half / 2][g * 2 + half % 2];
  }
}

// V vectors of columns from column `first` of the panels on.
template <class Step, int R, int V>
__attribute__((noinline)) void tile(const TileTask& t, int first) {
  const TileTask task = t;  // a copy, which writing sums can't change
  constexpr int kWidth = Step::kWidth;  // columns of a vector
  constexpr int kPanels = V * kWidth > kPanel ? 2 : 1;
  const int64_t group = task.group ? task.group : task.steps;
  const int lines = task.prefetch.lines;
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
#pragma GCC unroll 1
    for (int part = 0; part < 2; ++part) {
      const uint8_t* const* fetch = part ? task.prefetch.next : task.prefetch.here;
      const uint8_t* const from[2] = {fetch[0], fetch[1]};
      const int64_t end = part || until < task.prefetch.split ? until : task.prefetch.split;
      for (; i < end; ++i) {
        for (int l = 0; l < lines; ++l)
#pragma GCC unroll 2
          for (int p = 0; p < kPanels; ++p) _mm_prefetch((const char*)(from[p] + (i * lines + l) * 64), _MM_HINT_T0);
        Step::template multiply<R, V>(sums, task, i, first);
      }
    }
    float factor[R][4];
    if (task.group) factors(task, g, factor);
    const bool fresh = task.fresh && g == 0;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int j = 0; j < V; ++j) {
        const int column = first + j * kWidth;
        float* at = task.sums + r * task.stride + column;
        if constexpr (Step::kScaled) {
          if (task.group) {
            const Vec scale = splat(factor[r][column / (kPanel / 2)]);
            store(at, fresh ? mul(sums[r][j], scale) : fma(sums[r][j], scale, load(at)));
            continue;
          }
        }
        Step::write(at, sums[r][j]);
      }
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
