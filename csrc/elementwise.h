// Embedding rows, rotary positions and silu(gate) * up, forward and backward.
#pragma once

#include "math.h"
#include "runtime.h"

namespace zerogap {

// A token outside the table gives a row of NaN: the logprob is then not finite, and the run stops on it.
template <class T>
void embedding(const T* table_VH, const int64_t* tokens, T* out, long rows, long vocab, long width) {
  parallel_rows(rows, width, [&](long r) {
    T* target = out + r * width;
    if (tokens[r] >= 0 && tokens[r] < vocab)
      std::memcpy(target, table_VH + tokens[r] * width, width * sizeof(T));
    else
      for_vectors(width, [&](long j, int n) { store(target + j, splat(__builtin_nanf("")), n); });
  });
}

// dtable (fp32, zeroed by the caller) += dy, rows in ascending order; threads own columns, not rows.
template <class T>
void embedding_backward(const T* dy, const int64_t* tokens, float* dtable, long rows, long vocab, long width) {
  constexpr long kColumns = 64;
  parallel_for(ceil_divide(width, kColumns), double(rows) * width, Denormals::kept, [&](long block) {
    const long first = block * kColumns, count = std::min(kColumns, width - first);
    for (long r = 0; r < rows; ++r) {
      if (tokens[r] < 0 || tokens[r] >= vocab) continue;
      float* target = dtable + tokens[r] * width + first;
      for_vectors(count, [&](long j, int n) {
        store(target + j, load(target + j, n) + load(dy + r * width + first + j, n), n);
      });
    }
  });
}

// Half-split rotation of the first `heads` heads of each row, (x1 c - x2 s, x2 c + x1 s), reading `in` and writing
// `out` (may be the same); the rest of a row is copied. sign -1 rotates back: the backward pass.
template <class T>
void rotary(const T* in, T* out, const float* cos, const float* sin, const int32_t* positions, long rows, long heads,
            long row_width, long dim, float sign) {
  const long half = dim / 2;
  parallel_rows(rows, 3 * row_width, [&](long r) {
    const T* x = in + r * row_width;
    T* y = out + r * row_width;
    const float* c = cos + positions[r] * half;
    const float* s = sin + positions[r] * half;
    for (long h = 0; h < heads; ++h, x += dim, y += dim)
      for_vectors(half, [&](long j, int n) {
        const Vec first = load(x + j, n), second = load(x + half + j, n);
        const Vec cosine = load(c + j, n), sine = load(s + j, n) * splat(sign);
        store(y + j, fnma(second, sine, first * cosine), n);
        store(y + half + j, fma(first, sine, second * cosine), n);
      });
    if (in != out) std::memcpy(y, x, (row_width - heads * dim) * sizeof(T));
  });
}

// [gate | up] rows of 2 * width -> silu(gate) * up.
template <class T>
void silu_mul(const T* gate_up, T* out, long rows, long width) {
  parallel_rows(rows, 30 * width, [&](long r) {
    const T* gate = gate_up + r * 2 * width;
    for_vectors(width, [&](long j, int n) {
      store(out + r * width + j, silu(load(gate + j, n)) * load(gate + width + j, n), n);
    });
  });
}

template <class T>
void silu_mul_backward(const T* gate_up, const T* dy, T* dgate_up, long rows, long width) {
  parallel_rows(rows, 40 * width, [&](long r) {
    const T* gate = gate_up + r * 2 * width;
    T* dgate = dgate_up + r * 2 * width;
    for_vectors(width, [&](long j, int n) {
      const Vec g = load(gate + j, n), up = load(gate + width + j, n), d = load(dy + r * width + j, n);
      const Vec one = splat(1.f), sigmoid = one / sigmoid_denominator(g);
      store(dgate + width + j, d * (g * sigmoid), n);
      store(dgate + j, d * up * (sigmoid * fma(g, one - sigmoid, one)), n);
    });
  });
}

}  // namespace zerogap
