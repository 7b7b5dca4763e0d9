// The named activations on fp32 accumulators.
#pragma once

#include <initializer_list>

#include "simd.h"

namespace {

enum Kind : int64_t { kSwiglu = 0, kSwigluOai = 1, kGeglu = 2, kGegluTanh = 3, kRelu2 = 4, kSilu = 5 };
enum Clamp : int64_t { kNoClamp = 0, kClampBefore = 1, kClampAfter = 2 };

struct Activation {
  int64_t kind, clamp;
  float limit, alpha, beta;
};

// Both propagate a NaN of x, as torch's clamp does.
inline Vec at_most(Vec x, float bound) { return where_less(splat(bound), x, splat(bound), x); }
inline Vec at_least(Vec x, float bound) { return where_less(x, splat(bound), splat(bound), x); }

// 2^n * p(r) with |r| <= ln2 / 2: relative error below 2e-7; infinity above 88.8, NaN propagates.
inline Vec exponential(Vec x) {
  const Vec bounded = at_least(at_most(x, 89.0f), -104.0f);
  const Vec n = nearest(mul(bounded, splat(1.44269504088896341f)));
  const Vec r = fnma(n, splat(-2.12194440e-4f), fnma(n, splat(0.693359375f), bounded));
  Vec p = splat(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) p = fma(p, r, splat(c));
  return scale_by_power(fma(mul(p, r), r, add(r, splat(1.0f))), n);
}

inline Vec sigmoid_times(Vec value, Vec x, float alpha) { return div(value, add(splat(1.0f), exponential(mul(x, splat(-alpha))))); }

// x * Phi(x). erfc(z) = t exp(-z^2 + p(t)) with t = 1 / (1 + z / 2): p is a least-squares fit over z in [0, 10], error 7e-9 of the value.
inline Vec gelu(Vec x) {
  const Vec z = mul(absolute(x), splat(0.70710678118654752f));
  const Vec t = div(splat(1.0f), fma(z, splat(0.5f), splat(1.0f)));
  Vec p = splat(-1.449133103e-01f);
  for (float c : {9.902578573e-01f, -2.836915841e+00f, 4.314971762e+00f, -3.630209634e+00f, 1.720586754e+00f, -7.361437515e-01f,
                  2.329245124e-01f, 3.532014781e-01f, 1.001818218e+00f, -1.265578042e+00f})
    p = fma(p, t, splat(c));
  const Vec tail = mul(mul(splat(0.5f), t), exponential(fnma(z, z, p)));
  return mul(x, where_less(x, zero(), tail, add(splat(1.0f), mul(tail, splat(-1.0f)))));
}

inline Vec gelu_tanh(Vec x) {
  const Vec inner = mul(mul(x, splat(1.5957691216057308f)), fma(mul(x, x), splat(0.044715f), splat(1.0f)));
  return sigmoid_times(x, inner, 1.0f);
}

inline Vec activate(Vec gate, Vec up, const Activation& a) {
  switch (a.kind) {
    case kGeglu: return mul(gelu(gate), up);
    case kGegluTanh: return mul(gelu_tanh(gate), up);
    case kRelu2: return mul(at_least(gate, 0.0f), at_least(gate, 0.0f));
    case kSilu: return sigmoid_times(gate, gate, 1.0f);
    default: break;
  }
  if (a.clamp == kClampBefore) gate = at_most(gate, a.limit);
  if (a.clamp) up = at_least(at_most(up, a.limit), -a.limit);
  Vec value = sigmoid_times(gate, gate, a.alpha);
  if (a.clamp == kClampAfter) value = at_most(value, a.limit);
  return mul(value, add(up, splat(a.beta)));
}

}  // namespace
