// exp, log and silu from the same few IEEE operations on every instruction set. No libm.
#pragma once

#include "vector.h"

namespace zerogap {

// Relative error below 2 units in the last place on [-87, 88]. 0 below -87 (there exp(x) < 2^-125); above 88 the
// value of 88. NaN stays NaN: max and min return their second operand when one of the two is NaN.
ZEROGAP_INLINE Vec exp(Vec x) {
  Vec clamped = min(splat(88.f), max(splat(-87.5f), x));
  Vec magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer, held in the low mantissa bits
  Vec shifted = fma(clamped, splat(1.44269504f), magic);
  Vec n = shifted - magic;
  Vec r = fnma(n, splat(0.693145752f), clamped);  // ln 2 in two parts, the first exact in 16 bits
  r = fnma(n, splat(1.42860677e-6f), r);
  Vec p = splat(1.98756915e-4f);
  p = fma(p, r, splat(1.39819995e-3f));
  p = fma(p, r, splat(8.33345205e-3f));
  p = fma(p, r, splat(4.16657962e-2f));
  p = fma(p, r, splat(1.66666657e-1f));
  p = fma(p, r, splat(5.00000000e-1f));
  p = fma(p, r * r, r) + splat(1.f);
  return zero_where_less(p * shift_to_exponent(shifted), x, -87.f);
}

ZEROGAP_INLINE float exp(float x) {
  float lanes[kLanes];
  store(lanes, exp(splat(x)));
  return lanes[0];
}

// Natural logarithm, correct to the last fp32 place or two: atanh series in double. log(0) = -inf, negative: NaN.
inline float log(float x) {
  if (!(x > 0.f)) return x == 0.f ? -kInfinity : __builtin_nanf("");
  if (x == kInfinity) return x;
  uint64_t bits = bit_cast<uint64_t>(static_cast<double>(x));
  int exponent = static_cast<int>(bits >> 52) - 1023;
  double mantissa = bit_cast<double>((bits & 0xfffffffffffffull) | (1023ull << 52));
  if (mantissa > 1.4142135623730951) {
    mantissa *= 0.5;
    ++exponent;
  }
  double s = (mantissa - 1.0) / (mantissa + 1.0), square = s * s, series = 1.0 / 19;
  for (int k = 17; k >= 1; k -= 2) series = __builtin_fma(series, square, 1.0 / k);
  return static_cast<float>(__builtin_fma(exponent, 0.6931471805599453, 2.0 * s * series));
}

ZEROGAP_INLINE Vec sigmoid_denominator(Vec x) { return exp(splat(0.f) - x) + splat(1.f); }

ZEROGAP_INLINE Vec silu(Vec x) { return x / sigmoid_denominator(x); }

}  // namespace zerogap
