// One call: its memory, and the work of each item of the plan.
#pragma once

#include "activation.h"
#include "plan.h"
#include "quantise.h"
#include "scratch.h"
#include "team.h"

namespace {

#ifdef __AVX512BF16__
constexpr bool kBf16Rows = true;
#else
constexpr bool kBf16Rows = false;
#endif

constexpr int64_t kRowPad = 64;  // keeps rows whose length is a power of two out of one set of the cache

class Layer {
 public:
  explicit Layer(const Call& c) : c_(c), sorted_(c), act_{c.kind, c.clamp, float(c.limit), float(c.alpha), float(c.beta)},
      fp8_(c.format == kFp8 || c.format == kFp8WeightOnly), rows_(int64_t(sorted_.token.size())),
      // Rows of bf16 x are taken where they lie when they need no padding.
      in_place_(direct()), order_(c, int64_t(sorted_.blocks.size()), rows_, !in_place_),
      ready_(sorted_.blocks.size()), slice_done_(order_.slices), combined_(order_.slices) {
    depth_ = c.format == kInt8 ? 4 : c.format == kWeightF16 || c.format == kWeightF32 ? 1 : 2;
    row_size_ = c.format == kInt8 ? 1 : kBf16Rows && (c.format == kWeightBf16 || fp8_) ? 2 : 4;
    groups13_ = (c.steps13 * 2 + kGroup - 1) / kGroup, groups2_ = (c.steps2 * 2 + kGroup - 1) / kGroup;
    step_bytes_ = c.format == kInt8 || c.format == kWeightBf16 || c.format == kWeightF32 ? kPanel * 4 : kPanel * 2;
    width_ = c.panels13 * (c.gated ? kPanel / 2 : kPanel);
    quantised_ = c.format == kFp8 || c.format == kInt8;
    x_stride_ = in_place_ ? c.hidden * size_of(c.x_type) : c.steps13 * depth_ * row_size_ + kRowPad;
    h_stride_ = width_ * (quantised_ ? 4 : row_size_) + kRowPad;
    y_stride_ = order_.slice_panels * kPanel;
    x_scale_stride_ = c.format == kInt8 ? 1 : groups13_, h_scale_stride_ = c.format == kInt8 ? 1 : groups2_;
    int64_t bytes = 0;
    auto take = [&](int64_t size) { return bytes += (size + 127) & ~int64_t(63), bytes - ((size + 127) & ~int64_t(63)); };
    const int64_t x = take(in_place_ ? 0 : c.tokens * x_stride_), h = take(rows_ * h_stride_), y = take(rows_ * y_stride_ * 4);
    const int64_t xs = take(quantised_ ? c.tokens * x_scale_stride_ * 4 : 0), hs = take(quantised_ ? rows_ * h_scale_stride_ * 4 : 0);
    const int64_t weights = take(c.tokens * c.top_k * 4);
    uint8_t* base = scratch().get(bytes);
    x_ = in_place_ ? (uint8_t*)c.x : base + x, h_ = base + h, y_ = (float*)(base + y);
    x_scales_ = (float*)(base + xs), h_scales_ = (float*)(base + hs), weights_ = (float*)(base + weights);
    to_floats(c.scale_type, c.scale, c.tokens * c.top_k, weights_);
  }

  static Scratch& scratch() {
    static thread_local Scratch mine;
    return mine;
  }

  // What each thread does.
  void operator()() {
    for (int64_t item; (item = next_.value.fetch_add(1, std::memory_order_relaxed)) < order_.total;) work(item);
  }

 private:
  bool direct() const {
    if (c_.format == kWeightF32) return true;
    return kBf16Rows && (c_.format == kWeightBf16 || (c_.format == kFp8WeightOnly && c_.x_type == kBf16)) && c_.hidden % 2 == 0;
  }

  void work(int64_t item) {
    if (item < order_.prepare) return prepare(item);
    item -= order_.prepare;
    if (item < order_.first) return first_product(item);
    item -= order_.first;
    const int64_t slice = item / (order_.second + order_.combine), inside = item % (order_.second + order_.combine);
    if (inside < order_.second) return second_product(slice, inside);
    combine(slice, inside - order_.second);
  }

  const uint8_t* panel13(int64_t expert, int64_t panel) const { return c_.w13 + (expert * c_.panels13 + panel) * c_.steps13 * step_bytes_; }
  const uint8_t* panel2(int64_t expert, int64_t panel) const { return c_.w2 + (expert * c_.panels2 + panel) * c_.steps2 * step_bytes_; }

  // Rows of x in the products' own type, padded with zeros.
  void prepare(int64_t item) {
    const int64_t padded = c_.steps13 * depth_;
    std::vector<float> row(padded, 0.0f);
    for (int64_t t = c_.tokens * item / order_.prepare; t < c_.tokens * (item + 1) / order_.prepare; ++t) {
      to_floats(c_.x_type, (const uint8_t*)c_.x + t * c_.hidden * size_of(c_.x_type), c_.hidden, row.data());
      store_row(row.data(), padded, x_ + t * x_stride_, x_scales_ + t * x_scale_stride_);
    }
    prepared_.value.fetch_add(1, std::memory_order_release);
  }

  void store_row(const float* row, int64_t count, uint8_t* to, float* scales) const {
    if (c_.format == kInt8) return quantise_row(row, count, to, scales);
    if (c_.format == kFp8) return quantise_groups(row, count, kGroup, row_size_ == 4, to, scales);
    if (row_size_ == 4) std::memcpy(to, row, count * 4);
    if (row_size_ == 2)
      for (int64_t i = 0; i < count; ++i) ((uint16_t*)to)[i] = bf16_of(row[i]);
  }

  void first_product(int64_t item) {
    const int64_t number = item / order_.per_block13, begin = item % order_.per_block13 * order_.chunk13;
    const int64_t end = std::min(begin + order_.chunk13, c_.panels13);
    const Block block = sorted_.blocks[number];
    alignas(64) static thread_local float sums[kMostRows * kPanel];
    const uint8_t* rows[kMostRows];
    const float* scales[kMostRows];
    wait_until([&] { return prepared_.value.load(std::memory_order_acquire) >= order_.prepare; });
    for (int r = 0; r < block.count; ++r) {
      const int64_t token = sorted_.token[block.begin + r];
      rows[r] = x_ + token * x_stride_, scales[r] = x_scales_ + token * x_scale_stride_;
    }
    for (int64_t panel = begin; panel < end; ++panel) {
      Product p{};
      p.w = panel13(block.expert, panel), p.steps = c_.steps13;
      p.panel_scales = fp8_ ? c_.s13 + (block.expert * c_.panels13 + panel) * groups13_ * 2 : nullptr, p.groups = groups13_;
      p.sums = sums, p.stride = kPanel;
      const int64_t column = (block.expert * c_.panels13 + panel) * kPanel;
      multiply(p, block.count, rows, scales, {at(c_.s13, column), at(c_.c13, column), at(c_.b13, column)});
      for (int r = 0; r < block.count; ++r) activate_panel(sums + r * kPanel, block.begin + r, panel);
    }
    if (ready_[number].value.fetch_add(1, std::memory_order_acq_rel) + 1 == order_.per_block13) finish(number);
  }

  void activate_panel(const float* sums, int64_t row, int64_t panel) {
    const int wide = c_.gated ? kPanel / 2 : kPanel;
    // On hosts that multiply in fp32, h is rounded to the model's type all the same.
    const bool round = !quantised_ && row_size_ == 4 && c_.x_type != kF32;
    uint16_t rounded[kLanes];
    for (int j = 0; j < wide; j += kLanes) {
      const Vec gate = load(sums + j), value = activate(gate, c_.gated ? load(sums + wide + j) : gate, act_);
      const int64_t at = panel * wide + j;
      uint8_t* to = h_ + row * h_stride_;
      if (round) {
        put(c_.x_type, rounded, 0, value);
        store((float*)to + at, c_.x_type == kBf16 ? from_bf16(rounded) : from_f16(rounded));
      } else {
        put(!quantised_ && row_size_ == 2 ? kBf16 : kF32, to, at, value);
      }
    }
  }

  // All of h of a block is there: the thread that saw it quantises it, then the second product may begin.
  void finish(int64_t number) {
    const Block block = sorted_.blocks[number];
    if (quantised_)
      for (int64_t row = block.begin; row < block.begin + block.count; ++row) {
        uint8_t* h = h_ + row * h_stride_;
        store_row((const float*)h, std::min(width_, c_.steps2 * depth_), h, h_scales_ + row * h_scale_stride_);
      }
    ready_[number].value.fetch_add(1, std::memory_order_release);
  }

  void second_product(int64_t slice, int64_t item) {
    const int64_t number = item / order_.per_block2, from = slice * order_.slice_panels;
    const int64_t begin = from + item % order_.per_block2 * order_.chunk2;
    const int64_t end = std::min({begin + order_.chunk2, from + order_.slice_panels, c_.panels2});
    const Block block = sorted_.blocks[number];
    const uint8_t* rows[kMostRows];
    const float* scales[kMostRows];
    for (int r = 0; r < block.count; ++r)
      rows[r] = h_ + (block.begin + r) * h_stride_, scales[r] = h_scales_ + (block.begin + r) * h_scale_stride_;
    wait_until([&] { return ready_[number].value.load(std::memory_order_acquire) > order_.per_block13; });
    if (slice > 0) wait_until([&] { return combined_[slice - 1].value.load(std::memory_order_acquire) >= order_.combine; });
    for (int64_t panel = begin; panel < end; ++panel) {
      Product p{};
      p.w = panel2(block.expert, panel), p.steps = c_.steps2;
      p.panel_scales = fp8_ ? c_.s2 + (block.expert * c_.panels2 + panel) * groups2_ * 2 : nullptr, p.groups = groups2_;
      p.sums = y_ + block.begin * y_stride_ + (panel - from) * kPanel, p.stride = y_stride_;
      const int64_t column = (block.expert * c_.panels2 + panel) * kPanel;
      multiply(p, block.count, rows, scales, {at(c_.s2, column), at(c_.c2, column), at(c_.b2, column)});
    }
    slice_done_[slice].value.fetch_add(1, std::memory_order_release);
  }

  // What is known of an item's columns; int8 has the first two, `bias` may be null.
  struct Columns {
    const float* scales;
    const int32_t* corrections;
    const float* bias;
  };

  template <typename T>
  static const T* at(const T* base, int64_t i) {
    return base ? base + i : nullptr;
  }

  // One product, with int8's scales and the bias applied.
  void multiply(Product& p, int count, const uint8_t* const* rows, const float* const* row_scales, const Columns& columns) const {
    p.rows = rows, p.count = count;
    if (c_.format == kFp8) p.row_scales = row_scales;
    alignas(64) static thread_local uint8_t decoded[kGroup * kPanel * 4];
    switch (c_.format) {
      case kWeightBf16:
#ifdef __AVX512BF16__
        product<WordStep<Bf16Words>>(p);
#else
        product<FloatStep<Bf16Pairs>>(p);
#endif
        break;
      case kWeightF16: product<FloatStep<F16Singles>>(p); break;
      case kWeightF32: product<FloatStep<F32Singles>>(p); break;
      case kInt8:
#ifdef __AVX512BF16__
        product<WordStep<Int8Words>>(p);
#endif
        break;
      default: product_fp8(p, decoded);
    }
    if (c_.format != kInt8 && !columns.bias) return;
    for (int r = 0; r < count; ++r)
      for (int j = 0; j < kPanel; j += kLanes) {
        float* at = p.sums + r * p.stride + j;
        Vec value = load(at);
        if (c_.format == kInt8) {
          int32_t sums[kLanes];
          std::memcpy(sums, at, sizeof sums);
          for (int i = 0; i < kLanes; ++i) sums[i] -= columns.corrections[j + i];
          value = mul(from_int(sums), mul(splat(*row_scales[r]), load(columns.scales + j)));
        }
        store(at, columns.bias ? add(value, load(columns.bias + j)) : value);
      }
  }

  // Each token's weighted sum over its experts, in the order of its ids.
  void combine(int64_t slice, int64_t item) {
    wait_until([&] { return slice_done_[slice].value.load(std::memory_order_acquire) >= order_.second; });
    const int64_t begin = item * order_.units_an_item, end = std::min(begin + order_.units_an_item, order_.combine_units);
    const int64_t pieces = order_.combine_units / std::max<int64_t>(c_.tokens, 1);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t token = unit / pieces, piece = unit % pieces * order_.combine_columns;
      const int64_t until = std::min({piece + order_.combine_columns, y_stride_, c_.hidden - slice * y_stride_});
      const int32_t* position = sorted_.position.data() + token * c_.top_k;
      const float* weight = weights_ + token * c_.top_k;
      for (int64_t j = piece; j < until; j += kLanes) {
        Vec sum = zero();
        for (int64_t k = 0; k < c_.top_k; ++k)
          if (position[k] >= 0) sum = fma(splat(weight[k]), load(y_ + position[k] * y_stride_ + j), sum);
        const int64_t at = token * c_.hidden + slice * y_stride_ + j;
        if (j + kLanes <= until) {
          put(c_.x_type, c_.out, at, sum);
        } else {
          float values[kLanes];
          store(values, sum);
          for (int64_t i = 0; i < until - j; ++i) put_float(c_.x_type, c_.out, at + i, values[i]);
        }
      }
    }
    combined_[slice].value.fetch_add(1, std::memory_order_release);
  }

  const Call& c_;
  const Sorted sorted_;
  const Activation act_;
  const bool fp8_;
  const int64_t rows_;
  const bool in_place_;
  const Order order_;
  int64_t depth_, row_size_, groups13_, groups2_, step_bytes_, width_;
  bool quantised_;
  int64_t x_stride_, h_stride_, y_stride_, x_scale_stride_, h_scale_stride_;
  uint8_t *x_, *h_;
  float *y_, *x_scales_, *h_scales_, *weights_;
  Counter next_, prepared_;
  std::vector<Counter> ready_, slice_done_, combined_;
};

inline void experts(const Call& c) {
  {
    Layer layer(c);
    on_threads(c.threads, GompParallel(c.gomp), layer);
  }
  Layer::scratch().trim();
}

}  // namespace
