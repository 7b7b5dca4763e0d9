// The inner loop of both products: up to 6 token rows times a panel of 64 weight columns, accumulated in registers.
//
// A panel holds its columns step by step of the inner dimension. A `Step` says how many inner elements a step has (`depth`), how many
// bytes of the panel (`bytes`), and how one step is multiplied in.
#pragma once

#include "simd.h"

namespace {

constexpr int kPanel = 64;
constexpr int kRows = 6;

struct TileTask {
  const uint8_t* rows[kRows];  // where step 0 of each token row lies
  const uint8_t* w;            // where step 0 of the panel lies
  int64_t steps;
  float* sums;  // [rows][stride]
  int64_t stride;
  bool fresh;  // start from zero, not from what `sums` holds
  // With `group` > 0: every so many steps, sums += product * row_scales[row][group] * panel_scales[group][half of the panel].
  int64_t group;
  const float* row_scales[kRows];  // null: 1
  const float* panel_scales;
  uint8_t* decoded;  // where a step that keeps its weights puts them
  const uint8_t* fetch;  // memory to fetch meanwhile, `fetch_lines` of 64 bytes a step
  int fetch_lines;
};

// The factors of group `g`: of every row, for each half of the panel.
template <int R>
void factors(const TileTask& task, int64_t g, float (&out)[R][2]) {
  for (int r = 0; r < R; ++r) {
    const float row = task.row_scales[r] ? task.row_scales[r][g] : 1.0f;
    for (int half = 0; half < 2; ++half) out[r][half] = row * task.panel_scales[g * 2 + half];
  }
}

// V vectors of columns from column `first` of the panel on.
template <class Step, int R, int V>
__attribute__((noinline)) void tile(const TileTask& t, int first) {
  const TileTask task = t;  // a copy, which writing sums can't change
  constexpr int kWidth = Step::kWidth;  // columns of a vector
  const int64_t group = task.group ? task.group : task.steps;
  const int lines = task.fetch_lines;
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
    for (; i < until; ++i) {
      for (int l = 0; l < lines; ++l) _mm_prefetch((const char*)(task.fetch + (i * lines + l) * 64), _MM_HINT_T0);
      Step::template multiply<R, V>(sums, task, i, first);
    }
    float factor[R][2];
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

// A whole panel by as many tiles as the registers ask for.
template <class Step>
void panel_tile(int rows, const TileTask& t) {
  if constexpr (Step::kWidth == 16) {
    return tile_of<Step, 4>(rows, t, 0);
  } else {
    if (rows == 1) return tile_of<Step, 8>(rows, t, 0);
    const int width = rows <= 3 ? 4 : 2;
    for (int first = 0; first < kPanel; first += width * Step::kWidth) {
      if (width == 4) tile_of<Step, 4>(rows, t, first);
      if (width == 2) tile_of<Step, 2>(rows, t, first);
    }
  }
}

}  // namespace
