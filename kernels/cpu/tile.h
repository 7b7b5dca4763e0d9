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
  bool fresh;          // start from zero, not from what `sums` holds
  const float* scale;  // null, or [rows][4]: sums += scale * product, a factor for each half of each panel
  Prefetch prefetch;
};

// V vectors of columns from column `first` of the panels on.
template <class Step, int R, int V>
void tile(const TileTask& t, int first) {
  constexpr int kWidth = Step::kWidth;  // columns of a vector
  const TileTask task = t;
  typename Step::Sum sums[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) {
      if (task.fresh || task.scale) {
        sums[r][j] = Step::none();
      } else {
        sums[r][j] = Step::read(task.sums + r * task.stride + first + j * kWidth);
      }
    }
  constexpr int kPanels = V * kWidth > kPanel ? 2 : 1;
  int64_t i = 0;
  for (int part = 0; part < 2; ++part) {
    const int64_t end = part ? task.steps : task.prefetch.split;
    for (; i < end; ++i) {
      for (int l = 0; l < task.prefetch.lines; ++l)
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) {
          const uint8_t* from = part ? task.prefetch.next[p] : task.prefetch.here[p];
          _mm_prefetch((const char*)(from + (i * task.prefetch.lines + l) * 64), _MM_HINT_T0);
        }
      Step::template multiply<R, V>(sums, task.rows, task.w, i, first);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) {
      const int column = first + j * kWidth;
      float* at = task.sums + r * task.stride + column;
      if constexpr (Step::kScaled) {
        if (task.scale) {
          const Vec factor = splat(task.scale[r * 4 + column / (kPanel / 2)]);
          store(at, task.fresh ? mul(sums[r][j], factor) : fma(sums[r][j], factor, load(at)));
          continue;
        }
      }
      Step::write(at, sums[r][j]);
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
