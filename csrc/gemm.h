// C = A B in fp32, each output element computed in ONE fixed order: the whole of batch invariance. k is cut into chains
// of kChainSteps (fixed, from k = 0); a chain is fused multiply-adds, k ascending, from zero; chains are added ascending.
// An element depends on its row of A and its column of B only, whatever M, the tiling, the layout of B, the threads.
#pragma once

#include "panel.h"

namespace zerogap {

constexpr int kTileRows = 6;
constexpr long kChainSteps = 128;  // short chains round less: half the error of one chain over the whole of k
constexpr long kStepBlock = 8 * kChainSteps;  // k is walked in blocks that keep a panel in L2

ZEROGAP_INLINE Vec broadcast(const float* a) { return splat(*a); }
ZEROGAP_INLINE Pairs broadcast(const bf16* a) {
  uint32_t pair;
  std::memcpy(&pair, a, sizeof(pair));
  return splat_pair(pair);
}

// How a tile meets what is in C already.
enum class Into {
  replace,   // C = chain
  add,       // C = C + chain, the chain from zero
  continue_  // the chain goes on from C (attention: keys on several pages are one chain)
};

// A register tile over one chain: C[Rows][16 * Vectors] from A[Rows][...] B[steps][...]. Operands: fp32 x fp32,
// fp32 x bf16 (attention over a bf16 cache, widened exactly) and bf16 pairs x bf16 pairs (linear layers).
template <class A, class B, int Rows, int Vectors>
__attribute__((noinline)) void tile(const A* a, long lda, const B* b, long ldb, long steps, float* c, long ldc,
                                    Into into) {
  Vec sum[Rows][Vectors];
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v)
      sum[r][v] = into == Into::continue_ ? load(c + r * ldc + v * kLanes) : splat(0.f);
  for (long s = 0; s < steps; ++s, b += ldb, a += PanelTraits<A>::kStep) {
    decltype(load(b)) right[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) right[v] = load(b + v * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      auto left = broadcast(a + r * lda);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sum[r][v] = multiply_add(left, right[v], sum[r][v]);
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v) {
      float* target = c + r * ldc + v * kLanes;
      store(target, into == Into::add ? load(target) + sum[r][v] : sum[r][v]);
    }
}

template <int Vectors, class A, class B>
ZEROGAP_INLINE void tile_of_rows(int rows, const A* a, long lda, const B* b, long ldb, long steps, float* c, long ldc,
                                 Into into) {
  switch (rows) {
    case 1: return tile<A, B, 1, Vectors>(a, lda, b, ldb, steps, c, ldc, into);
    case 2: return tile<A, B, 2, Vectors>(a, lda, b, ldb, steps, c, ldc, into);
    case 3: return tile<A, B, 3, Vectors>(a, lda, b, ldb, steps, c, ldc, into);
    case 4: return tile<A, B, 4, Vectors>(a, lda, b, ldb, steps, c, ldc, into);
    case 5: return tile<A, B, 5, Vectors>(a, lda, b, ldb, steps, c, ldc, into);
    default: return tile<A, B, 6, Vectors>(a, lda, b, ldb, steps, c, ldc, into);
  }
}

// Up to 6 rows, any multiple of 16 columns.
template <class A, class B>
void tile_columns(int rows, long columns, const A* a, long lda, const B* b, long ldb, long steps, float* c, long ldc,
                  Into into) {
  long j = 0;
  for (; j + kTileVectors * kLanes <= columns; j += kTileVectors * kLanes)
    tile_of_rows<kTileVectors>(rows, a, lda, b + j, ldb, steps, c + j, ldc, into);
  for (; j < columns; j += kLanes) tile_of_rows<1>(rows, a, lda, b + j, ldb, steps, c + j, ldc, into);
}

// body(first row, rows) over near-equal groups of at most 6 rows (7 rows run as 4 + 3, not 6 + 1).
template <class Body>
ZEROGAP_INLINE void for_row_groups(long rows, Body body) {
  const long groups = ceil_divide(rows, kTileRows);
  for (long g = 0; g < groups; ++g) {
    const long first = rows * g / groups;
    body(first, static_cast<int>(rows * (g + 1) / groups - first));
  }
}

// Any number of rows: small products inside attention, each one chain; `accumulate` goes on with the chain in C.
template <class A, class B>
void multiply(long rows, long columns, const A* a, long lda, const B* b, long ldb, long steps, float* c, long ldc,
              bool accumulate) {
  const Into into = accumulate ? Into::continue_ : Into::replace;
  for_row_groups(rows, [&](long r, int count) {
    tile_columns(count, columns, a + r * lda, lda, b, ldb, steps, c + r * ldc, ldc, into);
  });
}

// How B lies in memory: `packed` panels (pack_panels), rows [N, K] (a weight), or rows [K, N] (backward).
enum class Layout { packed = 0, nk = 1, kn = 2 };

template <class T>
struct Right {
  const void* data;
  Layout layout;
  long n, k;
  long row_stride;  // of nk and kn

  // Steps [step0, step1) of panel p; built in `buffer` unless it already lies packed.
  const PanelElement<T>* panel(long p, long step0, long step1, PanelElement<T>* buffer) const {
    if (layout == Layout::packed)
      return static_cast<const PanelElement<T>*>(data) + (p * panel_steps<T>(k) + step0) * kPanelColumns;
    if (layout == Layout::nk)
      panel_from_nk(static_cast<const T*>(data), row_stride, p * kPanelColumns, n, k, step0, step1, buffer);
    else
      panel_from_kn(static_cast<const T*>(data), row_stride, p * kPanelColumns, n, k, step0, step1, buffer);
    return buffer;
  }
};

// Rows of A (at most 6) times one block of a panel, chain by chain.
template <class T>
ZEROGAP_INLINE void chains(int rows, long columns, const T* a, long lda, const PanelElement<T>* panel, long steps,
                           bool accumulate, float* c, long ldc) {
  long s = 0;
  do {
    tile_columns(rows, columns, a + s * PanelTraits<T>::kStep, lda, panel + s * kPanelColumns, kPanelColumns,
                 std::min(kChainSteps, steps - s), c, ldc, accumulate || s > 0 ? Into::add : Into::replace);
    s += kChainSteps;
  } while (s < steps);
}

// The same into C of any width and type: bias and rounding once, after the last block.
template <class T, class Out>
void panel_rows(int rows, const T* a, long lda, const PanelElement<T>* panel, long steps, long width, bool accumulate,
                const T* bias, Out* c, long ldc) {
  if constexpr (sizeof(Out) == sizeof(float))
    if (width == kPanelColumns && !bias)
      return chains(rows, kPanelColumns, a, lda, panel, steps, accumulate, c, ldc);
  alignas(64) float sums[kTileRows * kPanelColumns];
  if (accumulate)
    for (int r = 0; r < rows; ++r)
      for_vectors(width, [&](long j, int n) { store(sums + r * kPanelColumns + j, load(c + r * ldc + j, n)); });
  chains(rows, round_up(width, kLanes), a, lda, panel, steps, accumulate, sums, kPanelColumns);
  for (int r = 0; r < rows; ++r)
    for_vectors(width, [&](long j, int n) {
      Vec sum = load(sums + r * kPanelColumns + j);
      store(c + r * ldc + j, bias ? sum + load(bias + j, n) : sum, n);
    });
}

// Panel p, rows [first, last). Blocks of k only where C is fp32 and can hold an unfinished sum.
template <class T, class Out>
void panel_task(const T* a, long lda, const Right<T>& b, long p, long first, long last, bool accumulate, const T* bias,
                Out* c, long ldc) {
  const long steps = panel_steps<T>(b.k), n0 = p * kPanelColumns, width = std::min<long>(kPanelColumns, b.n - n0);
  const long block = sizeof(Out) == sizeof(float) ? std::min(steps, kStepBlock) : steps;
  PanelElement<T>* buffer = nullptr;
  if (b.layout != Layout::packed) buffer = scratch<PanelElement<T>>(Scratch::panel, block * kPanelColumns);
  long s = 0;
  do {
    const long count = std::min(block, steps - s);
    const PanelElement<T>* panel = b.panel(p, s, s + count, buffer);
    const T* bias_now = bias && s + count == steps ? bias + n0 : nullptr;
    for_row_groups(last - first, [&](long r, int rows) {
      panel_rows(rows, a + (first + r) * lda + s * PanelTraits<T>::kStep, lda, panel, count, width,
                 accumulate || s > 0, bias_now, c + (first + r) * ldc + n0, ldc);
    });
    s += count;
  } while (s < steps);
}

// C[m, n] (+)= A[m, k] B + bias. Rows of A must be readable (and zero) up to an even k in bf16: see `padded_left`.
template <class T, class Out>
void gemm(const T* a, long lda, const Right<T>& b, const T* bias, Out* c, long ldc, long m, bool accumulate) {
  if (m == 0 || b.n == 0) return;
  const long panels = ceil_divide(b.n, kPanelColumns);
  // Split the rows too where there are few panels per thread, but keep enough rows to pay for building a panel.
  long splits = std::max(1l, std::min(m / 96, ceil_divide(4l * max_threads(), panels)));
  if (max_threads() == 1) splits = 1;
  const Denormals mode = PanelTraits<T>::kStep == 2 ? Denormals::flushed : Denormals::kept;
  parallel_for(panels * splits, 2.0 * m * b.n * b.k, mode, [&](long task) {
    const long p = task / splits, i = task % splits;
    panel_task(a, lda, b, p, m * i / splits, m * (i + 1) / splits, accumulate, bias, c, ldc);
  });
}

// A with rows that the bf16 pair loads may read: A itself, or for odd k a copy with one zero appended to each row.
inline const float* padded_left(const float* a, long, long k, long* lda, Scratch) {
  *lda = k;
  return a;
}
inline const bf16* padded_left(const bf16* a, long m, long k, long* lda, Scratch slot) {
  *lda = round_up(k, 2);
  if (k % 2 == 0) return a;
  bf16* copy = scratch<bf16>(slot, m * *lda);
  for (long r = 0; r < m; ++r) {
    std::memcpy(copy + r * *lda, a + r * k, k * sizeof(bf16));
    copy[r * *lda + k] = {0};
  }
  return copy;
}

template <class T, class Out>
void linear(const T* x_MK, const Right<T>& weight, const T* bias, Out* y_MN, long m) {
  long lda;
  const T* left = padded_left(x_MK, m, weight.k, &lda, Scratch::left);
  gemm(left, lda, weight, bias, y_MN, weight.n, m, false);
}

// dX[M, K] = dY[M, N] W[N, K]
template <class T>
void linear_input_gradient(const T* dy_MN, const T* weight_NK, T* dx_MK, long m, long n, long k) {
  linear<T, T>(dy_MN, Right<T>{weight_NK, Layout::kn, k, n, k}, nullptr, dx_MK, m);
}

// dW[N, K] = dY[M, N]^T X[M, K], fp32
template <class T>
void linear_weight_gradient(const T* dy_MN, const T* x_MK, float* dw_NK, long m, long n, long k) {
  const long padded = round_up(m, PanelTraits<T>::kStep);
  T* dy_NM = scratch<T>(Scratch::left, n * padded);
  transpose_rows(dy_MN, m, n, dy_NM, padded);
  gemm<T, float>(dy_NM, padded, Right<T>{x_MK, Layout::kn, k, m, k}, nullptr, dw_NK, k, n, false);
}

}  // namespace zerogap
