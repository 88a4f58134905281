// RMS norm over rows (with the residual add) and over heads, forward and backward.
#pragma once

#include "math.h"
#include "runtime.h"

namespace zerogap {

// 1 / sqrt(mean(x^2) + eps): four rotating accumulators of 16 lanes, then a fixed tree.
template <class T>
ZEROGAP_INLINE float inverse_rms(const T* x, long length, float eps) {
  Vec sums[4] = {splat(0.f), splat(0.f), splat(0.f), splat(0.f)};
  for_vectors(length, [&](long j, int n) {
    Vec v = load(x + j, n);
    Vec& sum = sums[j / kLanes % 4];
    sum = fma(v, v, sum);
  });
  const float total = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
  return 1.f / __builtin_sqrtf(total / static_cast<float>(length) + eps);
}

template <class T>
ZEROGAP_INLINE void normalize(const T* x, const T* weight, T* y, long length, float eps) {
  const Vec inverse = splat(inverse_rms(x, length, eps));
  for_vectors(length, [&](long j, int n) { store(y + j, (load(x + j, n) * inverse) * load(weight + j, n), n); });
}

// y = norm(sum) * weight with sum = residual + x rounded to T first; residual null: sum is x and `sum_out` unused.
// `sum_out` may be `residual` itself.
template <class T>
void rms_norm(const T* x, const T* residual, T* sum_out, const T* weight, T* y, long rows, long width, float eps) {
  parallel_rows(rows, 4 * width, [&](long r) {
    const T* source = x + r * width;
    if (residual) {
      T* sum = sum_out + r * width;
      for_vectors(width, [&](long j, int n) {
        store(sum + j, load(residual + r * width + j, n) + load(source + j, n), n);
      });
      source = sum;
    }
    normalize(source, weight, y + r * width, width, eps);
  });
}

// dx of one row; adds the row's part of dweight (fp32).
template <class T>
ZEROGAP_INLINE void normalize_backward(const T* x, const T* weight, const T* dy, const T* dsum, T* dx, float* dweight,
                                       long length, float eps) {
  const float inverse = inverse_rms(x, length, eps);
  Vec product = splat(0.f);
  for_vectors(length, [&](long j, int n) {
    product = fma(load(dy + j, n) * load(weight + j, n), load(x + j, n), product);
  });
  const Vec scale = splat(inverse);
  const Vec pull = splat(sum_lanes(product) * inverse * inverse * inverse / static_cast<float>(length));
  for_vectors(length, [&](long j, int n) {
    Vec input = load(x + j, n), gradient = load(dy + j, n);
    Vec d = fnma(input, pull, gradient * load(weight + j, n) * scale);
    store(dx + j, dsum ? d + load(dsum + j, n) : d, n);
    store(dweight + j, fma(gradient, input * scale, load(dweight + j, n)), n);
  });
}

constexpr long kReduceRows = 64;  // rows per partial sum of a reduction over rows; fixed, so threads cannot matter

// total[width] = sum of body(row, partial) over all rows, in an order fixed by the number of rows alone.
template <class Body>
void reduce_rows(long rows, long width, float* total, Body body) {
  const long chunks = ceil_divide(rows, kReduceRows);
  float* partials = scratch<float>(Scratch::gradient, std::max(1l, chunks) * width);
  std::fill_n(partials, chunks * width, 0.f);
  parallel_for(chunks, 8.0 * rows * width, Denormals::kept, [&](long chunk) {
    const long last = std::min(rows, (chunk + 1) * kReduceRows);
    for (long r = chunk * kReduceRows; r < last; ++r) body(r, partials + chunk * width);
  });
  FloatMode mode(Denormals::kept);
  std::fill_n(total, width, 0.f);
  for (long chunk = 0; chunk < chunks; ++chunk)
    for_vectors(width, [&](long j, int n) {
      store(total + j, load(total + j, n) + load(partials + chunk * width + j, n), n);
    });
}

// x: what the norm read (the sum); dsum: gradient that reaches the sum by other ways (nullable).
template <class T>
void rms_norm_backward(const T* x, const T* weight, const T* dy, const T* dsum, T* dx, float* dweight, long rows,
                       long width, float eps) {
  reduce_rows(rows, width, dweight, [&](long r, float* partial) {
    const long at = r * width;
    normalize_backward(x + at, weight, dy + at, dsum ? dsum + at : nullptr, dx + at, partial, width, eps);
  });
}

// Query and key heads of fused rows normalised over head_dim; value heads copied.
template <class T>
void head_norm(const T* qkv, const T* q_weight, const T* k_weight, T* out, long rows, long q_heads, long kv_heads,
               long dim, float eps) {
  const long width = (q_heads + 2 * kv_heads) * dim;
  parallel_rows(rows, 4 * width, [&](long r) {
    const T* x = qkv + r * width;
    T* y = out + r * width;
    for (long h = 0; h < q_heads + kv_heads; ++h)
      normalize(x + h * dim, h < q_heads ? q_weight : k_weight, y + h * dim, dim, eps);
    const long values = (q_heads + kv_heads) * dim;
    std::memcpy(y + values, x + values, kv_heads * dim * sizeof(T));
  });
}

// dweights: [2, head_dim] fp32, queries then keys.
template <class T>
void head_norm_backward(const T* qkv, const T* q_weight, const T* k_weight, const T* dy, T* dqkv, float* dweights,
                        long rows, long q_heads, long kv_heads, long dim, float eps) {
  const long width = (q_heads + 2 * kv_heads) * dim;
  reduce_rows(rows, 2 * dim, dweights, [&](long r, float* partial) {
    for (long h = 0; h < q_heads + kv_heads; ++h) {
      const bool query = h < q_heads;
      const long at = r * width + h * dim;
      normalize_backward<T>(qkv + at, query ? q_weight : k_weight, dy + at, nullptr, dqkv + at,
                            partial + (query ? 0 : dim), dim, eps);
    }
    const long values = r * width + (q_heads + kv_heads) * dim;
    std::memcpy(dqkv + values, dy + values, kv_heads * dim * sizeof(T));
  });
}

// Gradient of a bias: fp32 sum over the rows of dy.
template <class T>
void column_sum(const T* dy, float* total, long rows, long width) {
  reduce_rows(rows, width, total, [&](long r, float* partial) {
    for_vectors(width, [&](long j, int n) {
      store(partial + j, load(partial + j, n) + load(dy + r * width + j, n), n);
    });
  });
}

}  // namespace zerogap
