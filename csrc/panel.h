// How a GEMM operand is laid out for the register tile: panels of 32 output columns, k ascending inside a panel.
#pragma once

#include "runtime.h"
#include "vector.h"

namespace zerogap {

constexpr int kPanelColumns = 32;

// Element of a panel and how many k it holds: fp32 one, bf16 a pair (k even in the low half).
template <class T>
struct PanelTraits;
template <>
struct PanelTraits<float> {
  using Element = float;
  static constexpr int kStep = 1;
};
template <>
struct PanelTraits<bf16> {
  using Element = uint32_t;
  static constexpr int kStep = 2;
};
template <class T>
using PanelElement = typename PanelTraits<T>::Element;
template <class T>
constexpr long panel_steps(long k) {
  return ceil_divide(k, PanelTraits<T>::kStep);
}

// 16 x 16 words of 32 bits: target[j][i] = source[i][j]. Strides in words; no alignment needed.
#if defined(ZEROGAP_AVX512)
inline void transpose_16x16(const uint32_t* source, long source_stride, uint32_t* target, long target_stride) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(source + i * source_stride);
  for (int i = 0; i < 16; i += 2) {  // interleave words of neighbouring rows, then double words of pairs of rows
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {  // now move whole 128-bit quarters
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(target + i * target_stride, r[i]);
}
#else
inline void transpose_16x16(const uint32_t* source, long source_stride, uint32_t* target, long target_stride) {
  for (int j = 0; j < 16; ++j)
    for (int i = 0; i < 16; ++i) std::memcpy(target + j * target_stride + i, source + i * source_stride + j, 4);
}
#endif

// target[c][r] = source[r][c] for 16 rows of 64 bytes: 16 columns of fp32, 32 of bf16 (source stride even). Strides in
// elements; elements are moved, never computed with.
template <class T>
constexpr long kLineColumns = 64 / long{sizeof(T)};
inline void transpose_lines(const float* source, long source_stride, float* target, long target_stride) {
  transpose_16x16(reinterpret_cast<const uint32_t*>(source), source_stride, reinterpret_cast<uint32_t*>(target),
                  target_stride);
}
inline void transpose_lines(const bf16* source, long source_stride, bf16* target, long target_stride) {
  uint32_t words[16][16];  // of two columns each; then their halves
  transpose_16x16(reinterpret_cast<const uint32_t*>(source), source_stride / 2, words[0], 16);
  for (long pair = 0; pair < 16; ++pair) {
    bf16* even = target + 2 * pair * target_stride;
    for (long i = 0; i < 16; ++i) even[i].bits = static_cast<uint16_t>(words[pair][i]);
    for (long i = 0; i < 16; ++i) even[target_stride + i].bits = static_cast<uint16_t>(words[pair][i] >> 16);
  }
}

ZEROGAP_INLINE uint32_t element_at(const float* row, long step, long) { return bit_cast<uint32_t>(row[step]); }
ZEROGAP_INLINE uint32_t element_at(const bf16* row, long step, long k_total) {
  uint32_t high = 2 * step + 1 < k_total ? row[2 * step + 1].bits : 0;
  return row[2 * step].bits | high << 16;
}

// Steps [step0, step1) of the panel of columns [n0, n0 + 32) of B, given as rows [N, K] (a weight matrix).
// Columns past N are zero.
template <class T>
void panel_from_nk(const T* b, long ldb, long n0, long n_total, long k_total, long step0, long step1,
                   PanelElement<T>* panel) {
  uint32_t* out = reinterpret_cast<uint32_t*>(panel);
  const long whole = k_total / PanelTraits<T>::kStep;  // steps that need no padding
  for (long j = 0; j < kPanelColumns; j += 16) {
    for (long s = step0; s < step1; s += 16) {
      uint32_t* block = out + (s - step0) * kPanelColumns + j;
      const T* corner = b + (n0 + j) * ldb + s * PanelTraits<T>::kStep;
      if (n0 + j + 16 <= n_total && s + 16 <= std::min(step1, whole) && sizeof(T) * ldb % 4 == 0) {
        for (long i = 16; i < 32; ++i) prefetch_line(corner + i * ldb);  // the next 16 rows
        transpose_16x16(reinterpret_cast<const uint32_t*>(corner), sizeof(T) * ldb / 4, block, kPanelColumns);
        continue;
      }
      for (long i = 0; i < std::min(16l, step1 - s); ++i)
        for (long column = 0; column < 16; ++column) {
          long n = n0 + j + column;
          block[i * kPanelColumns + column] = n < n_total ? element_at(b + n * ldb, s + i, k_total) : 0;
        }
    }
  }
}

// The same for B given as rows [K, N] (backward products).
template <class T>
void panel_from_kn(const T* b, long ldb, long n0, long n_total, long k_total, long step0, long step1,
                   PanelElement<T>* panel);
template <>
inline void panel_from_kn(const float* b, long ldb, long n0, long n_total, long, long step0, long step1,
                          float* panel) {
  const long width = std::min<long>(kPanelColumns, n_total - n0);
  for (long s = step0; s < step1; ++s) {
    float* row = panel + (s - step0) * kPanelColumns;
    std::memcpy(row, b + s * ldb + n0, width * sizeof(float));
    if (width < kPanelColumns) std::memset(row + width, 0, (kPanelColumns - width) * sizeof(float));
  }
}
template <>
inline void panel_from_kn(const bf16* b, long ldb, long n0, long n_total, long k_total, long step0, long step1,
                          uint32_t* panel) {
  static const bf16 zeros[kPanelColumns] = {};
  const long width = std::min<long>(kPanelColumns, n_total - n0);
  for (long s = step0; s < step1; ++s) {
    uint32_t* row = panel + (s - step0) * kPanelColumns;
    const bf16* low = b + 2 * s * ldb + n0;
    const bf16* high = 2 * s + 1 < k_total ? low + ldb : zeros;
    for (long j = 0; j < width; ++j) row[j] = low[j].bits | static_cast<uint32_t>(high[j].bits) << 16;
    if (width < kPanelColumns) std::memset(row + width, 0, (kPanelColumns - width) * sizeof(uint32_t));
  }
}

// All panels of a weight [N, K]: [ceil(N / 32)][steps][32]. The engine's run-time copy.
template <class T>
void pack_panels(const T* weight_NK, PanelElement<T>* panels, long n, long k) {
  const long steps = panel_steps<T>(k);
  parallel_for(ceil_divide(n, kPanelColumns), double(n) * k, Denormals::kept, [&](long p) {
    panel_from_nk(weight_NK, k, p * kPanelColumns, n, k, 0, steps, panels + p * steps * kPanelColumns);
  });
}

// target[c][r] = source[r][c], target rows padded with zeros to `padded_rows` elements.
template <class T>
void transpose_rows(const T* source, long rows, long columns, T* target, long padded_rows) {
  parallel_for(ceil_divide(columns, kLineColumns<T>), double(rows) * columns, Denormals::kept, [&](long block) {
    const long c0 = block * kLineColumns<T>, width = std::min(kLineColumns<T>, columns - c0);
    long r = 0;
    if (width == kLineColumns<T> && sizeof(T) * columns % 4 == 0)
      for (; r + 16 <= rows; r += 16) {
        for (long i = 32; i < 48; ++i) prefetch_line(source + (r + i) * columns + c0);  // rows to come
        transpose_lines(source + r * columns + c0, columns, target + c0 * padded_rows + r, padded_rows);
      }
    for (long c = 0; c < width; ++c)
      for (long i = r; i < padded_rows; ++i)
        target[(c0 + c) * padded_rows + i] = i < rows ? source[i * columns + c0 + c] : T{};
  });
}

}  // namespace zerogap
