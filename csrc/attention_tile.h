// The two products of attention for up to 6 rows, reading keys and values where they lie, in groups of 16 keys. A score
// is one chain over the head's dimensions, an output one chain over the keys, ascending: rows and pages change no bit.
#pragma once

#include "kv_cache.h"

namespace zerogap {

constexpr int kAttentionRows = 6;
#if defined(ZEROGAP_AVX512)
constexpr int kAttentionVectors = 4;  // 6 x 4 accumulators fill the 32 registers
#else
constexpr int kAttentionVectors = 1;
#endif

// Where the groups of a block of 64 keys lie: element (d, j) of group g at keys[g][d * key_stride + j], its value
// (j, d) at values[g][j * padded_dim + d].
template <class T>
struct KeyBlock {
  const T* keys[kKeyGroups];
  const T* values[kKeyGroups];
  long key_stride;
};

// Keeps gcc from loading a vector again, as a memory operand, for every row that uses it.
ZEROGAP_INLINE Vec in_register(Vec a) {
#if defined(ZEROGAP_AVX512)
  asm("" : "+v"(a.v));
#endif
  return a;
}

// sum[r][v] += left(r) * right[v], where right is read from source(v).
template <int Rows, int Vectors, class Left, class Source>
ZEROGAP_INLINE void multiply_step(Vec (&sum)[Rows][Vectors], Left left, Source source) {
  Vec right[Vectors];
#pragma GCC unroll 4
  for (int v = 0; v < Vectors; ++v) right[v] = in_register(load(source(v)));
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
    const Vec factor = splat(left(r));
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) sum[r][v] = fma(factor, right[v], sum[r][v]);
  }
}

// scores[Rows][16 * Vectors] (rows 64 apart) = queries x keys. Meanwhile the block `next` (nullable) is fetched, four
// lines of keys and four of values a step: the time of a decode step is that of its memory traffic.
template <class T, class N, int Rows, int Vectors>
__attribute__((noinline)) void score_tile(const float* queries, long query_stride, long dim, const T* const* keys,
                                          long key_stride, const KeyBlock<N>* next, float* scores) {
  const T* key[Vectors];
  Vec sum[Rows][Vectors];
#pragma GCC unroll 4
  for (int v = 0; v < Vectors; ++v) {
    key[v] = keys[v];
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) sum[r][v] = splat(0.f);
  }
  long d = 0;
  if (next) {
    const long next_stride = next->key_stride;
    for (int g = 0; g < kKeyGroups; ++g) {
      const N* next_key = next->keys[g];
      const N* next_value = next->values[g];
      for (const long end = dim * (g + 1) / kKeyGroups; d < end; ++d) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          prefetch_line(next_key + i * next_stride);
          if (i * kLanes * sizeof(N) % 64 == 0) prefetch_line(next_value + i * kLanes);
        }
        next_key += 4 * next_stride;
        next_value += 4 * kLanes;
        multiply_step(sum, [&](int r) { return queries[r * query_stride + d]; },
                      [&](int v) { return key[v] + d * key_stride; });
      }
    }
  }
  for (; d < dim; ++d)
    multiply_step(sum, [&](int r) { return queries[r * query_stride + d]; },
                  [&](int v) { return key[v] + d * key_stride; });
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(scores + r * kKeyBlock + v * kLanes, sum[r][v]);
}

// out[Rows][16 * Vectors] = out * scale[r] (null: zero) + probabilities[Rows][64] x values of keys [first, last).
template <class T, int Rows, int Vectors>
__attribute__((noinline)) void value_tile(const float* probabilities, const T* const* values, long column,
                                          long value_stride, long first, long last, const float* scale, float* out,
                                          long out_stride) {
  Vec sum[Rows][Vectors];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v)
      sum[r][v] = scale ? load(out + r * out_stride + v * kLanes) * splat(scale[r]) : splat(0.f);
  while (first < last) {
    const T* value = values[first / kLanes] + first % kLanes * value_stride + column;
    const long end = std::min(last, (first / kLanes + 1) * kLanes);
    for (; first < end; ++first, value += value_stride)
      multiply_step(sum, [&](int r) { return probabilities[r * kKeyBlock + first]; },
                    [&](int v) { return value + v * kLanes; });
  }
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(out + r * out_stride + v * kLanes, sum[r][v]);
}

// body(first, Constant<width>) over `vectors` vectors: as wide as the registers allow, then halves.
template <int Width = kAttentionVectors, class Body>
ZEROGAP_INLINE void for_widths(int vectors, Body body, int first = 0) {
  for (; first + Width <= vectors; first += Width) body(first, Constant<Width>{});
  if constexpr (Width > 1)
    if (first < vectors) for_widths<Width / 2>(vectors, body, first);
}

template <class T, class N>
void score_rows(int rows, int groups, const float* queries, long query_stride, long dim, const KeyBlock<T>& block,
                const KeyBlock<N>* next, float* scores) {
  for_widths(groups, [&](int g, auto width) {
    with_constant<kAttentionRows>(rows, [&](auto count) {
      score_tile<T, N, count.value, width.value>(queries, query_stride, dim, block.keys + g, block.key_stride,
                                                 g == 0 ? next : nullptr, scores + g * kLanes);
    });
  });
}

template <class T>
void value_rows(int rows, const float* probabilities, const KeyBlock<T>& block, long padded_dim, long first, long last,
                const float* scale, float* out) {
  for_widths(static_cast<int>(padded_dim / kLanes), [&](int v, auto width) {
    with_constant<kAttentionRows>(rows, [&](auto count) {
      value_tile<T, count.value, width.value>(probabilities, block.values, v * kLanes, padded_dim, first, last, scale,
                                              out + v * kLanes, padded_dim);
    });
  });
}

}  // namespace zerogap
