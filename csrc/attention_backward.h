// Gradient of attention over packed rows: probabilities are recomputed from q, k and the saved log sums. A task is one
// block of keys of one kv head. It owns dk and dv of its keys; dq of a tile of queries is added up over the blocks
// in ascending order, whichever threads run them, so the result does not depend on the threads. Scratch is one fp32
// copy of dq (by all threads together) and a few tiles per thread.
#pragma once

#include <atomic>
#include <thread>

#include "attention.h"

namespace zerogap {

constexpr long kBackwardKeys = 128;  // keys that a tile of queries meets at once; their tiles stay in L2
constexpr long kBackwardQueries = 64;

// target[c][r] = source[r][c] of a [rows, columns] block; both multiples of 16.
inline void transpose_block(const float* source, long rows, long columns, float* target, long target_stride) {
  for (long r = 0; r < rows; r += 16)
    for (long c = 0; c < columns; c += 16)
      transpose_lines(source + r * columns + c, columns, target + c * target_stride + r, target_stride);
}

template <int Rows, int Vectors>
__attribute__((noinline)) void one_chain(const float* a, long lda, const float* b, long ldb, long steps, float* c,
                                         long ldc, bool accumulate) {
  Sums<Rows, Vectors> sums;
  clear<Rows, Vectors>(sums);
  if (accumulate)
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < Vectors; ++v) sums[r][v] = load(c + r * ldc + v * kLanes);
  run_chain<float, float, Rows, Vectors, 0>(a, lda, b, ldb, steps, sums);
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v) store(c + r * ldc + v * kLanes, sums[r][v]);
}

// C[rows, columns] = A B, one chain whatever the length; `accumulate` goes on with the chain in C. Columns are a
// multiple of 16.
inline void multiply(long rows, long columns, const float* a, long lda, const float* b, long ldb, long steps, float* c,
                     long ldc, bool accumulate) {
  for_row_groups<kTileRows>(0, rows, [&](long first, int group) {
    for_tiles(group, columns, [&](auto count, auto vectors, long j) {
      one_chain<decltype(count)::value, decltype(vectors)::value>(a + first * lda, lda, b + j, ldb, steps,
                                                                  c + first * ldc + j, ldc, accumulate);
    });
  });
}

// Everything between the arrays (in T) is fp32, head_dim padded to 16 with zeros. Matrices of keys x queries have the
// keys as rows; column c of query tile i is the query of row i * tile_positions + c / group, head c % group of the kv
// head. The key of row t is seen by the rows t .. key_ends[t] - 1: those of its own sequence and, where it belongs to
// a shared prefix, of every sequence that goes on from it.
template <class T>
struct AttentionBackward {
  const T *qkv, *out;
  const float* log_sums;  // [rows, q_heads]
  const T* dout;
  T* dqkv;
  long rows;
  const int32_t* key_ends;
  HeadShape shape;
  float score_scale;

  const long dim = shape.head_dim, padded = shape.padded_dim(), group = shape.group();
  const long tile_positions = std::max(1l, kBackwardQueries / group);
  const long columns = round_up(tile_positions * group, kLanes);
  const long tiles = ceil_divide(rows, tile_positions), blocks = ceil_divide(rows, kBackwardKeys);
  std::vector<long> block_ends{};                   // one past the last row that sees a key of the block
  std::vector<std::atomic<int32_t>> contributed{};  // [tiles, kv_heads] 1 + the last block whose part is in dq, or 0
  float *deltas = nullptr, *dqueries = nullptr;     // [rows, q_heads]; [tiles, kv_heads, padded, columns]

  void run() {
    double work = 0;
    block_ends.resize(blocks);
    for (long b = 0; b < blocks; ++b) {
      const int32_t* ends = key_ends + b * kBackwardKeys;
      block_ends[b] = *std::max_element(ends, ends + std::min<long>(kBackwardKeys, rows - b * kBackwardKeys));
      work += 10.0 * kBackwardKeys * (block_ends[b] - b * kBackwardKeys) * shape.q_heads * dim;
    }
    contributed = std::vector<std::atomic<int32_t>>(tiles * shape.kv_heads);
    deltas = scratch<float>(Scratch::gradient, rows * shape.q_heads + tiles * shape.kv_heads * padded * columns);
    dqueries = deltas + rows * shape.q_heads;
    parallel_rows(rows, 2 * shape.q_heads * dim, [&](long t) {
      for (long i = t * shape.q_heads; i < (t + 1) * shape.q_heads; ++i) {
        Vec delta = splat(0.f);
        for_vectors(dim, [&](long d, int n) {
          delta = fma(load(dout + i * dim + d, n), load(out + i * dim + d, n), delta);
        });
        deltas[i] = sum_lanes(delta);
      }
    });
    // Blocks ascending, heads within a block: a task rarely has to wait for the one before it of its head.
    parallel_for(blocks * shape.kv_heads, work, Denormals::kept,
                 [&](long task) { key_block(task / shape.kv_heads, task % shape.kv_heads); });
  }

  // The tiles of one thread; *_t are transposed.
  struct Buffers {
    float *keys, *values, *keys_t, *dkeys, *dvalues;  // [kBackwardKeys][padded]
    float *queries, *douts, *queries_t, *douts_t;     // [columns][padded]
    float *probabilities, *dscores;                   // [kBackwardKeys][columns]
    float *log_sums, *deltas;                         // [columns]

    Buffers(long padded, long columns) {
      const long size = (5 * padded + 2 * columns) * kBackwardKeys + (4 * padded + 2) * columns;
      float* p = scratch<float>(Scratch::attention, size);
      auto take = [&](long n) { return std::exchange(p, p + n); };
      for (float** key_side : {&keys, &values, &keys_t, &dkeys, &dvalues}) *key_side = take(kBackwardKeys * padded);
      for (float** query_side : {&queries, &douts, &queries_t, &douts_t}) *query_side = take(columns * padded);
      for (float** scores : {&probabilities, &dscores}) *scores = take(kBackwardKeys * columns);
      for (float** per_query : {&log_sums, &deltas}) *per_query = take(columns);
    }
  };

  void key_block(long b, long head) {
    const Buffers buffer(padded, columns);
    const long first = b * kBackwardKeys, count = std::min<long>(kBackwardKeys, rows - first);
    for (long j = 0; j < kBackwardKeys; ++j) {
      const T* key = j < count ? qkv + (first + j) * shape.row() + (shape.q_heads + head) * dim : nullptr;
      widen_row(key, buffer.keys + j * padded);
      widen_row(key ? key + shape.kv_heads * dim : nullptr, buffer.values + j * padded);
    }
    transpose_block(buffer.keys, kBackwardKeys, padded, buffer.keys_t, kBackwardKeys);
    std::fill_n(buffer.dkeys, kBackwardKeys * padded, 0.f);
    std::fill_n(buffer.dvalues, kBackwardKeys * padded, 0.f);
    long begin = 0;  // keys [begin, end) of the block meet the tile
    for (long i = first / tile_positions; i * tile_positions < block_ends[b]; ++i) {
      while (key_ends[first + begin] <= i * tile_positions) ++begin;
      const long end = std::min(count, (i + 1) * tile_positions - first), keys = end - begin, at = begin * padded;
      const long queries = read_queries(i, head, buffer);
      multiply(keys, columns, buffer.keys + at, padded, buffer.queries_t, columns, dim, buffer.probabilities, columns,
               false);
      multiply(keys, columns, buffer.values + at, padded, buffer.douts_t, columns, dim, buffer.dscores, columns, false);
      for (long j = 0; j < keys; ++j) score_gradients(first + begin + j, j, i * tile_positions, queries, buffer);
      multiply(keys, padded, buffer.probabilities, columns, buffer.douts, padded, queries, buffer.dvalues + at, padded,
               true);
      multiply(keys, padded, buffer.dscores, columns, buffer.queries, padded, queries, buffer.dkeys + at, padded, true);
      add_query_gradients(b, begin, keys, i, head, buffer);
    }
    for (long j = 0; j < count; ++j) {
      T* dkey = dqkv + (first + j) * shape.row() + (shape.q_heads + head) * dim;
      for_vectors(dim, [&](long d, int n) {
        store(dkey + d, load(buffer.dkeys + j * padded + d) * splat(score_scale), n);
        store(dkey + shape.kv_heads * dim + d, load(buffer.dvalues + j * padded + d), n);
      });
    }
  }

  void widen_row(const T* source, float* target) const {  // null: a row of zeros
    if (source)
      for_vectors(dim, [&](long d, int n) { store(target + d, load(source + d, n)); });
    else
      std::fill_n(target, padded, 0.f);
  }

  // Fills the query side of the buffers; returns the number of columns that are queries.
  long read_queries(long tile, long head, const Buffers& buffer) const {
    const long first = tile * tile_positions, positions = std::min(tile_positions, rows - first);
    const long count = positions * group;
    for (long i = 0; i < positions; ++i) {
      const long per_query = (first + i) * shape.q_heads + head * group, at = i * group;
      const T* query = qkv + (first + i) * shape.row() + head * group * dim;
      for (long g = 0; g < group; ++g) {
        widen_row(query + g * dim, buffer.queries + (at + g) * padded);
        widen_row(dout + (per_query + g) * dim, buffer.douts + (at + g) * padded);
      }
      std::copy_n(log_sums + per_query, group, buffer.log_sums + at);
      std::copy_n(deltas + per_query, group, buffer.deltas + at);
    }
    for (long c = count; c < columns; ++c) {
      widen_row(nullptr, buffer.queries + c * padded);
      widen_row(nullptr, buffer.douts + c * padded);
      buffer.log_sums[c] = buffer.deltas[c] = 0.f;
    }
    transpose_block(buffer.queries, columns, padded, buffer.queries_t, columns);
    transpose_block(buffer.douts, columns, padded, buffer.douts_t, columns);
    return count;
  }

  // Row j: scores become probabilities, and gradients of probabilities those of scores.
  void score_gradients(long key, long j, long first_position, long queries, const Buffers& buffer) const {
    float *probability = buffer.probabilities + j * columns, *dscore = buffer.dscores + j * columns;
    const long seen = std::clamp((key - first_position) * group, 0l, queries);
    const long unseen = std::clamp((key_ends[key] - first_position) * group, seen, queries);
    for (long c = seen / kLanes * kLanes; c < unseen; c += kLanes) {
      const Vec p = exp(load(probability + c) * splat(score_scale) - load(buffer.log_sums + c));
      store(probability + c, p);
      store(dscore + c, p * (load(dscore + c) - load(buffer.deltas + c)));
    }
    for (float* values : {probability, dscore}) {
      std::fill(values, values + seen, 0.f);
      std::fill(values + unseen, values + columns, 0.f);
    }
  }

  // Adds the block's part of dq of a tile, after the parts of all earlier blocks; the last block writes dq.
  void add_query_gradients(long b, long begin, long keys, long tile, long head, const Buffers& buffer) {
    long before = b - 1;
    while (before >= 0 && block_ends[before] <= tile * tile_positions) --before;
    std::atomic<int32_t>& turn = contributed[tile * shape.kv_heads + head];
    for (int spins = 0; turn.load(std::memory_order_acquire) != before + 1; ++spins)
      if (spins > 1000) std::this_thread::yield();
    float* dquery_t = dqueries + (tile * shape.kv_heads + head) * padded * columns;
    multiply(dim, columns, buffer.keys_t + begin, kBackwardKeys, buffer.dscores, columns, keys, dquery_t, columns,
             before >= 0);
    turn.store(static_cast<int32_t>(b + 1), std::memory_order_release);

    const long first = tile * tile_positions, last = std::min(rows, first + tile_positions);
    if (b != (last - 1) / kBackwardKeys) return;
    std::fill_n(dquery_t + dim * columns, (padded - dim) * columns, 0.f);
    float* dquery = buffer.queries;  // read for the last time above
    transpose_block(dquery_t, padded, columns, dquery, padded);
    for (long c = 0; c < (last - first) * group; ++c) {
      T* target = dqkv + (first + c / group) * shape.row() + (head * group + c % group) * dim;
      for_vectors(dim, [&](long d, int n) {
        store(target + d, load(dquery + c * padded + d) * splat(score_scale), n);
      });
    }
  }
};

template <class T>
void attention_backward(const T* qkv, const T* out, const float* log_sums, const T* dout, T* dqkv, long rows,
                        const int32_t* key_ends, const HeadShape& shape, float score_scale) {
  AttentionBackward<T>{qkv, out, log_sums, dout, dqkv, rows, key_ends, shape, score_scale}.run();
}

}  // namespace zerogap
