// Gradient of attention over packed whole sequences: probabilities are recomputed from q, k and the saved log sums.
// One task per sequence and kv head writes its own dq, dk and dv, so the result does not depend on the threads.
#pragma once

#include "attention.h"

namespace zerogap {

// Transposes a [rows, columns] block; both multiples of 16.
inline void transpose_block(const float* source, long rows, long columns, float* target, long target_stride) {
  for (long r = 0; r < rows; r += 16)
    for (long c = 0; c < columns; c += 16)
      transpose_16x16(reinterpret_cast<const uint32_t*>(source + r * columns + c), columns,
                      reinterpret_cast<uint32_t*>(target + c * target_stride + r), target_stride);
}

// qkv, out, dout in T; dqkv [T rows, fused] in T. Everything between is fp32, head_dim padded to 16 with zeros.
template <class T>
void attention_backward(const T* qkv, const T* out, const float* log_sums, const T* dout, T* dqkv, long sequences,
                        const int32_t* starts, const HeadShape& shape, float score_scale) {
  const long dim = shape.head_dim, padded = shape.padded_dim(), group = shape.group();
  const long positions_per_tile = std::max(1l, kKeyBlock / group);
  const long tile_rows = round_up(positions_per_tile * group, kLanes);
  double work = 0;
  for (long s = 0; s < sequences; ++s) {
    const double length = starts[s + 1] - starts[s];
    work += length * length * dim * shape.q_heads * 5;
  }
  parallel_for(sequences * shape.kv_heads, work, Denormals::kept, [&](long task) {
    const long s = task / shape.kv_heads, h = task % shape.kv_heads;
    const long first = starts[s], length = starts[s + 1] - first;
    if (length == 0) return;
    const long keys_padded = round_up(length, kKeyBlock);
    const long rows_padded = round_up(length, positions_per_tile) * group + kLanes;
    float* p = scratch<float>(Scratch::attention, 2 * keys_padded * padded + 3 * rows_padded * padded + rows_padded +
                                                      4 * kKeyBlock * padded + 4 * kKeyBlock * tile_rows);
    auto take = [&](long n) { return std::exchange(p, p + n); };
    float* keys = take(keys_padded * padded);
    float* values = take(keys_padded * padded);
    float* queries = take(rows_padded * padded);
    float* dqueries = take(rows_padded * padded);
    float* douts = take(rows_padded * padded);
    float* deltas = take(rows_padded);
    float* keys_t = take(kKeyBlock * padded);
    float* values_t = take(kKeyBlock * padded);
    float* dkeys = take(kKeyBlock * padded);
    float* dvalues = take(kKeyBlock * padded);
    float* probabilities = take(kKeyBlock * tile_rows);
    float* probabilities_t = take(kKeyBlock * tile_rows);
    float* dscores = take(kKeyBlock * tile_rows);
    float* dscores_t = take(kKeyBlock * tile_rows);

    auto widen_row = [&](const T* source, float* target) {
      for_vectors(dim, [&](long d, int n) { store(target + d, load(source + d, n)); });
    };
    std::fill_n(keys, 2 * keys_padded * padded, 0.f);  // keys and values
    std::fill_n(dqueries, rows_padded * padded, 0.f);
    for (long i = 0; i < length; ++i) {
      const T* row = qkv + (first + i) * shape.row();
      widen_row(row + (shape.q_heads + h) * dim, keys + i * padded);
      widen_row(row + (shape.q_heads + shape.kv_heads + h) * dim, values + i * padded);
      for (long g = 0; g < group; ++g) {
        const long r = i * group + g, head = h * group + g;
        const long offset = ((first + i) * shape.q_heads + head) * dim;
        widen_row(row + head * dim, queries + r * padded);
        widen_row(dout + offset, douts + r * padded);
        Vec delta = splat(0.f);
        for_vectors(dim, [&](long d, int n) { delta = fma(load(dout + offset + d, n), load(out + offset + d, n), delta); });
        deltas[r] = sum_lanes(delta);
      }
    }
    for (long k0 = 0; k0 < length; k0 += kKeyBlock) {
      const float* key_block = keys + k0 * padded;
      transpose_block(key_block, kKeyBlock, padded, keys_t, kKeyBlock);
      transpose_block(values + k0 * padded, kKeyBlock, padded, values_t, kKeyBlock);
      std::fill_n(dkeys, kKeyBlock * padded, 0.f);
      std::fill_n(dvalues, kKeyBlock * padded, 0.f);
      for (long i0 = k0 / positions_per_tile * positions_per_tile; i0 < length; i0 += positions_per_tile) {
        const long rows = std::min(positions_per_tile, length - i0) * group, r0 = i0 * group;
        multiply(rows, kKeyBlock, queries + r0 * padded, padded, keys_t, kKeyBlock, padded, probabilities, kKeyBlock,
                 false);
        multiply(rows, kKeyBlock, douts + r0 * padded, padded, values_t, kKeyBlock, padded, dscores, kKeyBlock, false);
        for (long r = 0; r < tile_rows; ++r) {
          float* prob = probabilities + r * kKeyBlock;
          float* dscore = dscores + r * kKeyBlock;
          const long position = i0 + r / group;
          const long visible = r < rows ? std::clamp(position - k0 + 1, 0l, long{kKeyBlock}) : 0;
          if (visible > 0) {
            const Vec log_sum = splat(log_sums[(first + position) * shape.q_heads + h * group + r % group]);
            const Vec delta = splat(deltas[r0 + r]), scale = splat(score_scale);
            for (long j = 0; j < kKeyBlock; j += kLanes) {
              Vec probability = exp(load(prob + j) * scale - log_sum);
              store(prob + j, probability);
              store(dscore + j, probability * (load(dscore + j) - delta) * scale);
            }
          }
          std::fill(prob + visible, prob + kKeyBlock, 0.f);
          std::fill(dscore + visible, dscore + kKeyBlock, 0.f);
        }
        transpose_block(probabilities, tile_rows, kKeyBlock, probabilities_t, tile_rows);
        transpose_block(dscores, tile_rows, kKeyBlock, dscores_t, tile_rows);
        multiply(kKeyBlock, padded, probabilities_t, tile_rows, douts + r0 * padded, padded, rows, dvalues, padded,
                 true);
        multiply(kKeyBlock, padded, dscores_t, tile_rows, queries + r0 * padded, padded, rows, dkeys, padded, true);
        multiply(rows, padded, dscores, kKeyBlock, key_block, padded, kKeyBlock, dqueries + r0 * padded, padded, true);
      }
      for (long i = k0; i < std::min(length, k0 + kKeyBlock); ++i) {
        T* row = dqkv + (first + i) * shape.row();
        const long local = (i - k0) * padded;
        for_vectors(dim, [&](long d, int n) {
          store(row + (shape.q_heads + h) * dim + d, load(dkeys + local + d), n);
          store(row + (shape.q_heads + shape.kv_heads + h) * dim + d, load(dvalues + local + d), n);
        });
      }
    }
    for (long r = 0; r < length * group; ++r) {
      T* row = dqkv + (first + r / group) * shape.row() + (h * group + r % group) * dim;
      for_vectors(dim, [&](long d, int n) { store(row + d, load(dqueries + r * padded + d), n); });
    }
  });
}

}  // namespace zerogap
