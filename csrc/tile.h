// The register tile of every matrix product: one chain of fused multiply-adds per element of C, k ascending. How many
// rows and columns run together is chosen here and changes no bit. Also `multiply`, the small products of attention.
#pragma once

#include <type_traits>

#include "panel.h"

namespace zerogap {

template <int Value>
using Constant = std::integral_constant<int, Value>;

ZEROGAP_INLINE Vec broadcast(const float* a) { return splat(*a); }
ZEROGAP_INLINE Pairs broadcast(const bf16* a) {
  uint32_t pair;
  std::memcpy(&pair, a, sizeof(pair));
  return splat_pair(pair);
}

template <int Rows, int Vectors>
using Sums = Vec[Rows][Vectors];

template <int Rows, int Vectors>
ZEROGAP_INLINE void clear(Sums<Rows, Vectors>& sums) {
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) sums[r][v] = splat(0.f);
}

ZEROGAP_INLINE void prefetch_line(const void* line) {
#if defined(ZEROGAP_HAS_MXCSR)
  asm volatile("prefetcht1 (%0)" ::"r"(line));  // asm: gcc deletes loops that do nothing but __builtin_prefetch
#else
  __builtin_prefetch(line);
#endif
}

// sums[Rows][16 * Vectors] += A[Rows][...] B[steps][...]. Operands: fp32 x fp32, fp32 x bf16 (attention over a bf16
// cache, widened exactly) and bf16 pairs x bf16 pairs (linear layers). `Ahead`: bytes of B to fetch ahead, 0 for none.
template <class A, class B, int Rows, int Vectors, int Ahead>
ZEROGAP_INLINE void run_chain(const A* a, long lda, const B* b, long ldb, long steps, Sums<Rows, Vectors>& sums) {
  const A* lower = a + Rows / 2 * lda;
  asm("" : "+r"(lower));  // two bases share the offsets of their rows, which then fit the registers
  for (long s = 0; s < steps; ++s) {
    decltype(load(b)) right[Vectors];
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) {
      right[v] = load(b + v * kLanes);
      if constexpr (Ahead > 0) prefetch_line(reinterpret_cast<const char*>(b + v * kLanes) + Ahead);
    }
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      const auto left = broadcast(r < Rows / 2 ? a + r * lda : lower + (r - Rows / 2) * lda);
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) sums[r][v] = multiply_add(left, right[v], sums[r][v]);
    }
    a += PanelTraits<A>::kStep;
    lower += PanelTraits<A>::kStep;
    b += ldb;
  }
}

template <int Max, class Body>
ZEROGAP_INLINE void with_rows(int rows, Body body) {
  if constexpr (Max > 1)
    if (rows < Max) return with_rows<Max - 1>(rows, body);
  body(Constant<Max>{});
}

// body(rows, vectors, first column) over the register tiles of `rows` (at most kTileRows) x `columns`, a multiple of
// 16. Rows and vectors arrive as constants.
template <class Body>
ZEROGAP_INLINE void for_tiles(int rows, long columns, Body body) {
  with_rows<kTileRows>(rows, [&](auto count) {
    long j = 0;
    for (; j + kTileVectors * kLanes <= columns; j += kTileVectors * kLanes) body(count, Constant<kTileVectors>{}, j);
    if constexpr (kTileVectors > 1)
      if (j < columns) body(count, Constant<1>{}, j);
  });
}

// body(first row, rows) over near-equal groups of at most kTileRows (13 rows run as 7 + 6, not 12 + 1).
template <class Body>
ZEROGAP_INLINE void for_row_groups(long rows, Body body) {
  const long groups = ceil_divide(rows, kTileRows);
  for (long g = 0; g < groups; ++g) {
    const long first = rows * g / groups;
    body(first, static_cast<int>(rows * (g + 1) / groups - first));
  }
}

template <class A, class B, int Rows, int Vectors>
__attribute__((noinline)) void one_chain(const A* a, long lda, const B* b, long ldb, long steps, float* c, long ldc,
                                         bool accumulate) {
  Sums<Rows, Vectors> sums;
  clear<Rows, Vectors>(sums);
  if (accumulate)
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < Vectors; ++v) sums[r][v] = load(c + r * ldc + v * kLanes);
  run_chain<A, B, Rows, Vectors, 0>(a, lda, b, ldb, steps, sums);
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v) store(c + r * ldc + v * kLanes, sums[r][v]);
}

// C[rows, columns] = A B, one chain whatever the length; `accumulate` goes on with the chain in C (keys of several
// pages are one chain). Columns are a multiple of 16.
template <class A, class B>
void multiply(long rows, long columns, const A* a, long lda, const B* b, long ldb, long steps, float* c, long ldc,
              bool accumulate) {
  for_row_groups(rows, [&](long first, int group) {
    for_tiles(group, columns, [&](auto count, auto vectors, long j) {
      one_chain<A, B, decltype(count)::value, decltype(vectors)::value>(a + first * lda, lda, b + j, ldb, steps,
                                                                        c + first * ldc + j, ldc, accumulate);
    });
  });
}

}  // namespace zerogap
