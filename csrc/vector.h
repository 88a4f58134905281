// The 16-lane fp32 vector in which every kernel is written, with three back ends: AVX-512, AVX2 + FMA, plain C++.
// All three perform the same IEEE operation in each lane, so a kernel has the same bits on each of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

#define ZEROGAP_INLINE static inline __attribute__((always_inline))

namespace zerogap {

constexpr int kLanes = 16;
constexpr float kInfinity = __builtin_inff();

struct bf16 {
  uint16_t bits;
};

template <class To, class From>
ZEROGAP_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

ZEROGAP_INLINE float widen(float x) { return x; }
ZEROGAP_INLINE float widen(bf16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

// Round to nearest even, denormals to a zero of their sign: so does vcvtneps2bf16. Every NaN becomes the one quiet NaN,
// so that rounding cannot turn it into a number and its payload cannot differ.
ZEROGAP_INLINE bf16 narrow(float x) {
  if (x != x) return {0x7fc0};
  uint32_t bits = bit_cast<uint32_t>(x);
  if ((bits & 0x7f800000) == 0) bits &= 0x80000000;
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// Vec: 16 floats. Pairs: 16 pairs of bf16, the even element of a pair in the low half of a 32-bit word.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define ZEROGAP_AVX512 1
#endif
#if defined(ZEROGAP_AVX512)

struct Vec {
  __m512 v;
};
struct Pairs {
  __m512i v;
};
constexpr int kTileRows = 12, kTileVectors = 2;  // register tile of a product: 24 sums in 32 registers

ZEROGAP_INLINE Vec splat(float x) { return {_mm512_set1_ps(x)}; }
ZEROGAP_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
ZEROGAP_INLINE Vec load(const bf16* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
ZEROGAP_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
ZEROGAP_INLINE void store(bf16* p, Vec a) {
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
#if defined(__AVX512BF16__)
  __m256i rounded = (__m256i)_mm512_cvtneps_pbh(a.v);
#else
  __m512i bits = _mm512_castps_si512(a.v);
  const __mmask16 tiny = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
  bits = _mm512_mask_and_epi32(bits, tiny, bits, _mm512_set1_epi32(static_cast<int>(0x80000000u)));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  bits = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  __m256i rounded = _mm512_cvtepi32_epi16(bits);
#endif
  rounded = _mm256_mask_mov_epi16(rounded, nan, _mm256_set1_epi16(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), rounded);
}
ZEROGAP_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
ZEROGAP_INLINE Vec fnma(Vec a, Vec b, Vec c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
ZEROGAP_INLINE Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
ZEROGAP_INLINE Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
ZEROGAP_INLINE Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
ZEROGAP_INLINE Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
ZEROGAP_INLINE Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
ZEROGAP_INLINE Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
ZEROGAP_INLINE Vec zero_where_less(Vec value, Vec x, float bound) {
  __mmask16 less = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(bound), _CMP_LT_OQ);
  return {_mm512_mask_mov_ps(value.v, less, _mm512_setzero_ps())};
}
ZEROGAP_INLINE Vec shift_to_exponent(Vec a) {
  __m512i n = _mm512_slli_epi32(_mm512_castps_si512(a.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(127 << 23)))};
}
ZEROGAP_INLINE Pairs load(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
ZEROGAP_INLINE Pairs splat_pair(uint32_t pair) { return {_mm512_set1_epi32(static_cast<int>(pair))}; }
ZEROGAP_INLINE Vec even(Pairs a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
ZEROGAP_INLINE Vec odd(Pairs a) {
  return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}

#elif defined(__AVX2__) && defined(__FMA__)

struct Vec {
  __m256 a, b;
};
struct Pairs {
  __m256i a, b;
};
constexpr int kTileRows = 6, kTileVectors = 1;  // 12 sums in 16 registers

#define ZEROGAP_BOTH(op) {op(x.a, y.a), op(x.b, y.b)}
ZEROGAP_INLINE Vec splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
ZEROGAP_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
ZEROGAP_INLINE __m256 load8(const bf16* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
ZEROGAP_INLINE Vec load(const bf16* p) { return {load8(p), load8(p + 8)}; }
ZEROGAP_INLINE void store(float* p, Vec x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
ZEROGAP_INLINE Vec fma(Vec x, Vec y, Vec z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
ZEROGAP_INLINE Vec fnma(Vec x, Vec y, Vec z) {
  return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
}
ZEROGAP_INLINE Vec operator+(Vec x, Vec y) { return ZEROGAP_BOTH(_mm256_add_ps); }
ZEROGAP_INLINE Vec operator-(Vec x, Vec y) { return ZEROGAP_BOTH(_mm256_sub_ps); }
ZEROGAP_INLINE Vec operator*(Vec x, Vec y) { return ZEROGAP_BOTH(_mm256_mul_ps); }
ZEROGAP_INLINE Vec operator/(Vec x, Vec y) { return ZEROGAP_BOTH(_mm256_div_ps); }
ZEROGAP_INLINE Vec max(Vec x, Vec y) { return ZEROGAP_BOTH(_mm256_max_ps); }
ZEROGAP_INLINE Vec min(Vec x, Vec y) { return ZEROGAP_BOTH(_mm256_min_ps); }
#undef ZEROGAP_BOTH
ZEROGAP_INLINE Vec zero_where_less(Vec value, Vec x, float bound) {
  __m256 t = _mm256_set1_ps(bound);
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.a, t, _CMP_LT_OQ), value.a),
          _mm256_andnot_ps(_mm256_cmp_ps(x.b, t, _CMP_LT_OQ), value.b)};
}
ZEROGAP_INLINE __m256 shift_to_exponent8(__m256 a) {
  __m256i n = _mm256_slli_epi32(_mm256_castps_si256(a), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(n, _mm256_set1_epi32(127 << 23)));
}
ZEROGAP_INLINE Vec shift_to_exponent(Vec x) { return {shift_to_exponent8(x.a), shift_to_exponent8(x.b)}; }
ZEROGAP_INLINE Pairs load(const uint32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
ZEROGAP_INLINE Pairs splat_pair(uint32_t pair) {
  __m256i x = _mm256_set1_epi32(static_cast<int>(pair));
  return {x, x};
}
ZEROGAP_INLINE Vec even(Pairs x) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(x.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(x.b, 16))};
}
ZEROGAP_INLINE Vec odd(Pairs x) {
  __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(x.a, mask)), _mm256_castsi256_ps(_mm256_and_si256(x.b, mask))};
}

#else

struct Vec {
  float v[kLanes];
};
struct Pairs {
  uint32_t v[kLanes];
};
constexpr int kTileRows = 6, kTileVectors = 1;

#define ZEROGAP_LANES(expression)                         \
  Vec r;                                                  \
  for (int i = 0; i < kLanes; ++i) r.v[i] = (expression); \
  return r
ZEROGAP_INLINE Vec splat(float x) { ZEROGAP_LANES(x); }
ZEROGAP_INLINE Vec load(const float* p) { ZEROGAP_LANES(p[i]); }
ZEROGAP_INLINE Vec load(const bf16* p) { ZEROGAP_LANES(widen(p[i])); }
ZEROGAP_INLINE void store(float* p, Vec a) { std::memcpy(p, a.v, sizeof(a.v)); }
ZEROGAP_INLINE Vec fma(Vec a, Vec b, Vec c) { ZEROGAP_LANES(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
ZEROGAP_INLINE Vec fnma(Vec a, Vec b, Vec c) { ZEROGAP_LANES(__builtin_fmaf(-a.v[i], b.v[i], c.v[i])); }
ZEROGAP_INLINE Vec operator+(Vec a, Vec b) { ZEROGAP_LANES(a.v[i] + b.v[i]); }
ZEROGAP_INLINE Vec operator-(Vec a, Vec b) { ZEROGAP_LANES(a.v[i] - b.v[i]); }
ZEROGAP_INLINE Vec operator*(Vec a, Vec b) { ZEROGAP_LANES(a.v[i] * b.v[i]); }
ZEROGAP_INLINE Vec operator/(Vec a, Vec b) { ZEROGAP_LANES(a.v[i] / b.v[i]); }
ZEROGAP_INLINE Vec max(Vec a, Vec b) { ZEROGAP_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
ZEROGAP_INLINE Vec min(Vec a, Vec b) { ZEROGAP_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
ZEROGAP_INLINE Vec zero_where_less(Vec value, Vec x, float bound) { ZEROGAP_LANES(x.v[i] < bound ? 0.f : value.v[i]); }
ZEROGAP_INLINE Vec shift_to_exponent(Vec a) {
  ZEROGAP_LANES(bit_cast<float>((bit_cast<uint32_t>(a.v[i]) << 23) + (127u << 23)));
}
ZEROGAP_INLINE Vec even(Pairs a) { ZEROGAP_LANES(bit_cast<float>(a.v[i] << 16)); }
ZEROGAP_INLINE Vec odd(Pairs a) { ZEROGAP_LANES(bit_cast<float>(a.v[i] & 0xffff0000u)); }
#undef ZEROGAP_LANES
ZEROGAP_INLINE Pairs load(const uint32_t* p) {
  Pairs r;
  std::memcpy(r.v, p, sizeof(r.v));
  return r;
}
ZEROGAP_INLINE Pairs splat_pair(uint32_t pair) {
  Pairs r;
  for (uint32_t& x : r.v) x = pair;
  return r;
}

#endif

#if !defined(ZEROGAP_AVX512)
ZEROGAP_INLINE void store(bf16* p, Vec a) {
  float lanes[kLanes];
  store(lanes, a);
  for (int i = 0; i < kLanes; ++i) p[i] = narrow(lanes[i]);
}
#endif

// c + a.odd * b.odd, then + a.even * b.even: the order of vdpbf16ps, which also flushes denormals (see FloatMode).
ZEROGAP_INLINE Vec multiply_add(Pairs a, Pairs b, Vec c) {
#if defined(__AVX512BF16__)
  return {_mm512_dpbf16_ps(c.v, (__m512bh)a.v, (__m512bh)b.v)};
#else
  return fma(even(a), even(b), fma(odd(a), odd(b), c));
#endif
}
ZEROGAP_INLINE Vec multiply_add(Vec a, Vec b, Vec c) { return fma(a, b, c); }

// The first `count` elements, the other lanes 0; and the reverse.
template <class T>
ZEROGAP_INLINE Vec load(const T* p, int count) {
  if (count >= kLanes) return load(p);
  T lanes[kLanes] = {};
  std::memcpy(lanes, p, count * sizeof(T));
  return load(lanes);
}
template <class T>
ZEROGAP_INLINE void store(T* p, Vec a, int count) {
  if (count >= kLanes) return store(p, a);
  T lanes[kLanes];
  store(lanes, a);
  std::memcpy(p, lanes, count * sizeof(T));
}

// Calls body(offset, lanes) over a row of any length; only the last call may have fewer than 16 lanes.
template <class Body>
ZEROGAP_INLINE void for_vectors(long length, Body body) {
  long j = 0;
  for (; j + kLanes <= length; j += kLanes) body(j, kLanes);
  if (j < length) body(j, static_cast<int>(length - j));
}

// Fixed trees over the lanes: (i, i + 8), (i, i + 4), ... The last 8 lanes are the same shuffles on AVX-512 and AVX2.
#if defined(__AVX2__) && defined(__FMA__)
#if defined(ZEROGAP_AVX512)
ZEROGAP_INLINE __m256 lower(Vec a) { return _mm512_castps512_ps256(a.v); }
ZEROGAP_INLINE __m256 upper(Vec a) { return _mm512_extractf32x8_ps(a.v, 1); }
#else
ZEROGAP_INLINE __m256 lower(Vec a) { return a.a; }
ZEROGAP_INLINE __m256 upper(Vec a) { return a.b; }
#endif
#define ZEROGAP_TREE(op)                                                                         \
  const __m256 eight = _mm256_##op(lower(a), upper(a));                                          \
  const __m128 four = _mm_##op(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)); \
  const __m128 two = _mm_##op(four, _mm_movehl_ps(four, four));                                  \
  return _mm_cvtss_f32(_mm_##op(two, _mm_shuffle_ps(two, two, 1)))
ZEROGAP_INLINE float sum_lanes(Vec a) { ZEROGAP_TREE(add_ps); }
ZEROGAP_INLINE float max_lanes(Vec a) { ZEROGAP_TREE(max_ps); }
#undef ZEROGAP_TREE
#else
ZEROGAP_INLINE float sum_lanes(Vec a) {
  float t[kLanes];
  store(t, a);
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) t[i] = t[i] + t[i + half];
  return t[0];
}
ZEROGAP_INLINE float max_lanes(Vec a) {
  float t[kLanes];
  store(t, a);
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) t[i] = t[i] > t[i + half] ? t[i] : t[i + half];
  return t[0];
}
#endif

// Lanes from `count` on become `other`.
ZEROGAP_INLINE Vec keep_lanes(Vec a, int count, float other) {
#if defined(ZEROGAP_AVX512)
  return {_mm512_mask_mov_ps(_mm512_set1_ps(other), static_cast<__mmask16>((1u << count) - 1), a.v)};
#else
  float t[kLanes];
  store(t, a);
  for (int i = count; i < kLanes; ++i) t[i] = other;
  return load(t);
#endif
}

}  // namespace zerogap
