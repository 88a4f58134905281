// C = A B in fp32, each output element computed in ONE fixed order: the whole of batch invariance. k is cut into
// chains of kChainSteps (fixed, from k = 0); a chain is fused multiply-adds, k ascending, from zero; chains are added
// ascending. So an element depends on its row of A and its column of B only, whatever M, the tiling, the layout of B,
// the threads.
#pragma once

#include "tile.h"

namespace zerogap {

constexpr long kChainSteps = 128;  // short chains round less: half the error of one chain over the whole of k
constexpr long kStepBlock = 16 * kChainSteps;  // k is walked in blocks that keep a panel in L2
constexpr long kLeftBytes = 512 << 10;        // rows of A that stay in L2 while the panels pass
constexpr long kGroupBytes = 2 << 20;         // panels that stay in L3 while the rows of A pass
constexpr int kAheadBytes = 4096;             // how far a panel is fetched ahead, so that memory and arithmetic overlap
constexpr int kAheadRows = 7;                 // from so many rows; fewer are bound by memory, which then runs by itself

// sums[Rows][16 * Vectors] (+)= the chains of A[Rows] times columns of one panel.
template <class T, int Rows, int Vectors>
__attribute__((noinline)) void chains(const T* a, long lda, const PanelElement<T>* panel, long steps, bool accumulate,
                                      float* sums) {
  constexpr int ahead = Rows >= kAheadRows ? kAheadBytes : 0;
  long s = 0;
  do {
    Sums<Rows, Vectors> chain;
    clear<Rows, Vectors>(chain);
    run_chain<T, PanelElement<T>, Rows, Vectors, ahead>(a + s * PanelTraits<T>::kStep, lda, panel + s * kPanelColumns,
                                                        kPanelColumns, std::min(kChainSteps, steps - s), chain);
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < Vectors; ++v) {
        float* sum = sums + r * kPanelColumns + v * kLanes;
        store(sum, accumulate || s > 0 ? load(sum) + chain[r][v] : chain[r][v]);
      }
    s += kChainSteps;
  } while (s < steps);
}

// How B lies in memory: `packed` panels (pack_panels), rows [N, K] (a weight), or rows [K, N] (backward).
enum class Layout { packed = 0, nk = 1, kn = 2 };

// Consecutive panels over some steps of k: panel i at data + i * stride.
template <class T>
struct Panels {
  const PanelElement<T>* data;
  long stride, steps;
  Panels from(long panel) const { return {data + panel * stride, stride, steps}; }
};

template <class T>
struct Right {
  const void* data;
  Layout layout;
  long n, k;
  long row_stride;  // of nk and kn

  // Steps [step0, step1) of panels [first, last); built in scratch of this thread unless they already lie packed.
  Panels<T> panels(long first, long last, long step0, long step1) const {
    const long steps = panel_steps<T>(k), count = step1 - step0;
    if (layout == Layout::packed) {
      const auto* packed = static_cast<const PanelElement<T>*>(data);
      return {packed + (first * steps + step0) * kPanelColumns, steps * kPanelColumns, count};
    }
    const long stride = count * kPanelColumns;
    auto* built = scratch<PanelElement<T>>(Scratch::panel, (last - first) * stride);
    const T* rows = static_cast<const T*>(data);
    parallel_for(last - first, double(last - first) * stride, Denormals::kept, [&](long i) {
      const auto build = layout == Layout::nk ? panel_from_nk<T> : panel_from_kn<T>;
      build(rows, row_stride, (first + i) * kPanelColumns, n, k, step0, step1, built + i * stride);
    });
    return {built, stride, count};
  }
};

// C[rows, columns] (+)= A B + bias on this thread; the columns are those of the panels. Rounded once, at the end.
template <class T, class Out>
void rows_times_panels(const T* a, long lda, long rows, const Panels<T>& b, long columns, const T* bias, Out* c,
                       long ldc, bool accumulate) {
  alignas(64) float sums[kTileRows * kPanelColumns];
  for (long n0 = 0; n0 < columns; n0 += kPanelColumns) {
    const PanelElement<T>* panel = b.data + n0 / kPanelColumns * b.stride;
    const long width = std::min<long>(kPanelColumns, columns - n0);
    for_row_groups<kTileRows>(0, rows, [&](long first, int group) {
      const T* left = a + first * lda;
      Out* out = c + first * ldc + n0;
      if (accumulate)
        for (int r = 0; r < group; ++r)
          for_vectors(width, [&](long j, int n) { store(sums + r * kPanelColumns + j, load(out + r * ldc + j, n)); });
      for (int r = 0; r < group; ++r)
        for (long j = 0; j < width; j += 64 / long{sizeof(Out)}) prefetch_line_to_write(out + r * ldc + j);
      for_tiles(group, round_up(width, kLanes), [&](auto count, auto vectors, long j) {
        chains<T, decltype(count)::value, decltype(vectors)::value>(left, lda, panel + j, b.steps, accumulate,
                                                                    sums + j);
      });
      for (int r = 0; r < group; ++r)
        for_vectors(width, [&](long j, int n) {
          const Vec sum = load(sums + r * kPanelColumns + j);
          store(out + r * ldc + j, bias ? sum + load(bias + n0 + j, n) : sum, n);
        });
    });
  }
}

// C[m, n] (+)= A[m, k] B + bias. Rows of A must be readable (and zero) up to an even k in bf16: see `padded_left`.
template <class T, class Out>
void gemm(const T* a, long lda, const Right<T>& b, const T* bias, Out* c, long ldc, long m, bool accumulate) {
  if (m == 0 || b.n == 0) return;
  const long steps = panel_steps<T>(b.k), panels = ceil_divide(b.n, kPanelColumns);
  // Blocks of k only where C is fp32 and can hold an unfinished sum.
  const long block = sizeof(Out) == sizeof(float) ? std::min(steps, kStepBlock) : steps;
  const long step_bytes = sizeof(PanelElement<T>), panel_bytes = std::max(1l, block * kPanelColumns * step_bytes);
  const long row_blocks = ceil_divide(m, std::max<long>(kTileRows, kLeftBytes / std::max(1l, block * step_bytes)));
  const long group = b.layout == Layout::packed && row_blocks == 1
                         ? panels
                         : std::clamp(kGroupBytes / panel_bytes, 1l, panels);
  const Denormals mode = PanelTraits<T>::kStep == 2 ? Denormals::flushed : Denormals::kept;
  for (long p0 = 0; p0 < panels; p0 += group) {
    const long count = std::min(group, panels - p0);
    const double work = 2.0 * m * count * kPanelColumns * b.k;
    const long wanted = max_threads() > 1 ? std::min(32l * max_threads(), static_cast<long>(work / kParallelWork)) : 1;
    const long chunks = std::clamp(ceil_divide(wanted, row_blocks), 1l, count);
    long s = 0;
    do {
      const long last = std::min(steps, s + block);
      const Panels<T> right = b.panels(p0, p0 + count, s, last);
      const T* bias_now = last == steps ? bias : nullptr;
      parallel_for(row_blocks * chunks, work, mode, [&](long task) {
        const long i = task / chunks, chunk = task % chunks, first = count * chunk / chunks;
        const long row0 = m * i / row_blocks, row1 = m * (i + 1) / row_blocks;
        const long n0 = (p0 + first) * kPanelColumns;
        const long n1 = std::min(b.n, (p0 + count * (chunk + 1) / chunks) * kPanelColumns);
        rows_times_panels(a + row0 * lda + s * PanelTraits<T>::kStep, lda, row1 - row0, right.from(first), n1 - n0,
                          bias_now ? bias_now + n0 : nullptr, c + row0 * ldc + n0, ldc, accumulate || s > 0);
      });
      s = last;
    } while (s < steps);
  }
}

// Row stride at which A is read: even in bf16, whose pair loads take one element more, and not a multiple of 4 KB,
// which would put all rows of a tile into the same few lines of L1.
template <class T>
constexpr long left_stride(long k) {
  const long stride = round_up(k, PanelTraits<T>::kStep);
  return stride * sizeof(T) % 4096 ? stride : stride + 64 / static_cast<long>(sizeof(T));
}

// A itself where its rows lie at that stride already, else a copy, padded with zeros.
template <class T>
const T* padded_left(const T* a, long m, long k, long* lda, Scratch slot) {
  *lda = m > 6 ? left_stride<T>(k) : round_up(k, PanelTraits<T>::kStep);
  if (*lda == k) return a;
  T* copy = scratch<T>(slot, m * *lda);
  parallel_rows(m, k, [&](long r) {
    std::memcpy(copy + r * *lda, a + r * k, k * sizeof(T));
    std::memset(copy + r * *lda + k, 0, (*lda - k) * sizeof(T));
  });
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

// dW[N, K] = dY[M, N]^T X[M, K], fp32. dY is transposed in blocks of M that stay in L3.
template <class T>
void linear_weight_gradient(const T* dy_MN, const T* x_MK, float* dw_NK, long m, long n, long k) {
  const long block = std::min(m, kStepBlock * PanelTraits<T>::kStep), stride = left_stride<T>(block);
  T* dy_NM = scratch<T>(Scratch::left, n * stride);
  long first = 0;
  do {
    const long count = std::min(block, m - first);
    transpose_rows(dy_MN + first * n, count, n, dy_NM, stride);
    gemm<T, float>(dy_NM, stride, Right<T>{x_MK + first * k, Layout::kn, k, count, k}, nullptr, dw_NK, k, n, first > 0);
    first += count;
  } while (first < m);
}

}  // namespace zerogap
