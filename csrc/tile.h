// The register tile of every matrix product: one chain of fused multiply-adds per element of C, k ascending. How many
// rows and columns run together is chosen here and changes no bit.
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

// sums[Rows][16 * Vectors] += A[Rows][...] B[steps][...], fp32 or bf16 pairs. `Ahead`: bytes of B to fetch ahead, 0 for
// none.
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

// body(Constant<n>), n in 1..Max.
template <int Max, class Body>
ZEROGAP_INLINE void with_constant(int n, Body body) {
  if constexpr (Max > 1)
    if (n < Max) return with_constant<Max - 1>(n, body);
  body(Constant<Max>{});
}

// body(rows, vectors, first column) over the register tiles of `rows` (at most kTileRows) x `columns`, a multiple of
// 16. Rows and vectors arrive as constants.
template <class Body>
ZEROGAP_INLINE void for_tiles(int rows, long columns, Body body) {
  with_constant<kTileRows>(rows, [&](auto count) {
    long j = 0;
    for (; j + kTileVectors * kLanes <= columns; j += kTileVectors * kLanes) body(count, Constant<kTileVectors>{}, j);
    if constexpr (kTileVectors > 1)
      if (j < columns) body(count, Constant<1>{}, j);
  });
}

// body(first row, rows) over near-equal groups of at most Max of the rows [first, last): 13 run as 7 + 6, not 12 + 1.
template <int Max, class Body>
ZEROGAP_INLINE void for_row_groups(long first, long last, Body body) {
  const long rows = last - first, groups = ceil_divide(rows, Max);
  for (long g = 0; g < groups; ++g) {
    const long begin = rows * g / groups;
    body(first + begin, static_cast<int>(rows * (g + 1) / groups - begin));
  }
}

}  // namespace zerogap
