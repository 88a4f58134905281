// Causal attention over a paged KV cache: per query row an online softmax over key blocks of 64 at ABSOLUTE positions,
// ascending. So a row's bits do not depend on its batch, on chunking, on the page size or on where its pages lie.
#pragma once

#include <utility>
#include <vector>

#include "attention_tile.h"
#include "math.h"

namespace zerogap {

constexpr int kQueryRows = 48;  // rows (positions x grouped heads) that share one walk over the keys
constexpr int kFewRows = 12;    // more rows than this pay for widening a block of bf16 keys to fp32 first

// Rows of one kv head that walk the keys together. Row r is query head r % group of position first + r / group.
struct QueryTile {
  long sequence, kv_head;
  long first_row, first_position, positions;
  long last_position() const { return first_position + positions - 1; }
};

inline std::vector<QueryTile> query_tiles(const Sequences& sequences, const HeadShape& shape) {
  const long per_tile = std::max(1l, kQueryRows / shape.group());
  std::vector<QueryTile> tiles;
  for (long s = 0; s < sequences.count; ++s) {
    const long rows = sequences.starts[s + 1] - sequences.starts[s];
    for (long h = 0; h < shape.kv_heads; ++h)
      for (long t = 0; t < rows; t += per_tile)
        tiles.push_back({s, h, sequences.starts[s] + t, sequences.first_positions[s] + t,
                         std::min(per_tile, rows - t)});
  }
  return tiles;
}

// State of the online softmax of some rows, in one scratch buffer.
struct SoftmaxState {
  float *queries, *out, *scores, *sums, *max, *scale;
  float *keys, *values;  // a widened key block: [head_dim][64] and [64][padded_dim]

  SoftmaxState(long rows, const HeadShape& shape) {
    const long r = round_up(rows, kLanes), dim = shape.padded_dim();
    float* p = scratch<float>(Scratch::attention, r * (2 * dim + kKeyBlock + kLanes + 2) + 2 * kKeyBlock * dim);
    auto take = [&](long n) { return std::exchange(p, p + n); };
    queries = take(r * dim);
    out = take(r * dim);
    scores = take(r * kKeyBlock);
    sums = take(r * kLanes);
    max = take(r);
    scale = take(r);
    keys = take(kKeyBlock * dim);
    values = take(kKeyBlock * dim);
    std::fill_n(sums, rows * kLanes, 0.f);
    std::fill_n(max, r, -kInfinity);
    std::fill_n(scale, r, 0.f);
  }

  // Row r saw `visible` keys of this block: the others score -inf; the maximum rises; scale[r] = exponent of the
  // factor that what went before must be multiplied with.
  template <int Groups>
  void raise_maximum(long r, long visible) {
    float* s = scores + r * kKeyBlock;
    constexpr int kLast = (Groups - 1) * kLanes;
    if (visible < Groups * kLanes)
      store(s + kLast, keep_lanes(load(s + kLast), static_cast<int>(visible - kLast), -kInfinity));
    Vec top = load(s);
    for (int v = 1; v < Groups; ++v) top = zerogap::max(top, load(s + v * kLanes));
    const float block_max = max_lanes(top), old_max = max[r];
    if (block_max > old_max) max[r] = block_max;
    scale[r] = old_max - max[r];
  }

  // Scores become probabilities relative to the maximum. Groups that the row does not see add exact zeros.
  template <int Groups>
  void absorb(long r) {
    float* s = scores + r * kKeyBlock;
    const Vec shift = splat(max[r]);
    Vec p[kKeyGroups];
    for (int v = 0; v < kKeyGroups; ++v) p[v] = v < Groups ? exp(load(s + v * kLanes) - shift) : splat(0.f);
    for (int v = 0; v < Groups; ++v) store(s + v * kLanes, p[v]);
    store(sums + r * kLanes, fma(load(sums + r * kLanes), splat(scale[r]), (p[0] + p[1]) + (p[2] + p[3])));
  }
};

// One call of attention: where its operands lie, and the walk of one tile over its keys.
template <class T>
struct Attention {
  const T* qkv;
  T* out;
  float* log_sums;  // nullable
  const Sequences& sequences;
  const PagedCache<T>& cache;
  float score_scale;

  // The block of keys from k0; past the last key its groups repeat the first one.
  KeyBlock<T> block(const QueryTile& tile, long k0) const {
    const int32_t* pages = sequences.pages + tile.sequence * sequences.pages_per_sequence;
    const long page_size = cache.page_size;
    KeyBlock<T> result;
    result.key_stride = page_size;
    for (long g = 0; g < kKeyGroups; ++g) {
      const long position = k0 + (k0 + g * kLanes <= tile.last_position() ? g * kLanes : 0);
      const long page = pages[position / page_size], offset = position % page_size;
      result.keys[g] = cache.key_page(page, tile.kv_head) + offset;
      result.values[g] = cache.value_page(page, tile.kv_head) + offset * cache.shape.padded_dim();
    }
    return result;
  }

  // The same as fp32 in the state's buffers.
  KeyBlock<float> widened_block(const QueryTile& tile, long k0, const SoftmaxState& state) const {
    const int32_t* pages = sequences.pages + tile.sequence * sequences.pages_per_sequence;
    const long page_size = cache.page_size, padded = cache.shape.padded_dim();
    const long keys = std::min<long>(kKeyBlock, tile.last_position() + 1 - k0);
    for (long o = 0; o < keys; o += page_size) {
      const T* key = cache.key_page(pages[(k0 + o) / page_size], tile.kv_head);
      const T* value = cache.value_page(pages[(k0 + o) / page_size], tile.kv_head);
      for (long d = 0; d < cache.shape.head_dim; ++d)
        for_vectors(page_size, [&](long j, int n) {
          store(state.keys + d * kKeyBlock + o + j, load(key + d * page_size + j, n), n);
        });
      for (long i = 0; i < std::min(page_size, keys - o) * padded; i += kLanes)
        store(state.values + o * padded + i, load(value + i));
    }
    KeyBlock<float> result;
    result.key_stride = kKeyBlock;
    for (long g = 0; g < kKeyGroups; ++g) {
      result.keys[g] = state.keys + g * kLanes;
      result.values[g] = state.values + g * kLanes * padded;
    }
    return result;
  }

  // Rows [first, rows) of the tile absorb the block from k0; rows before `first` lie before it and see none of it.
  template <class K>
  void absorb_block(const QueryTile& tile, const KeyBlock<K>& block, const KeyBlock<T>* next, long k0,
                    SoftmaxState& state) const {
    const long group = cache.shape.group(), padded = cache.shape.padded_dim(), rows = tile.positions * group;
    const long first = std::max(0l, k0 - tile.first_position) * group;
    const bool all_visible = k0 + kKeyBlock <= tile.first_position + 1;
    auto visible = [&](long r) {
      return all_visible ? kKeyBlock : std::min<long>(kKeyBlock, tile.first_position + r / group + 1 - k0);
    };
    auto groups = [&](long r) { return static_cast<int>(ceil_divide(visible(r), kLanes)); };

    for_row_groups<kAttentionRows>(first, rows, [&](long r, int count) {
      score_rows(count, groups(r + count - 1), state.queries + r * padded, padded, cache.shape.head_dim, block,
                 r == first ? next : nullptr, state.scores + r * kKeyBlock);
    });
    for (long r = first; r < rows; ++r)
      with_constant<kKeyGroups>(groups(r), [&](auto n) { state.template raise_maximum<n.value>(r, visible(r)); });
    for (long r = first / kLanes * kLanes; r < rows; r += kLanes) store(state.scale + r, exp(load(state.scale + r)));
    for (long r = first; r < rows; ++r)
      with_constant<kKeyGroups>(groups(r), [&](auto n) { state.template absorb<n.value>(r); });
    for_row_groups<kAttentionRows>(first, rows, [&](long r, int count) {
      auto add = [&](long row, long key, long end, const float* scale) {
        value_rows(static_cast<int>(r + count - row), state.scores + row * kKeyBlock, block, padded, key, end, scale,
                   state.out + row * padded);
      };
      long key = visible(r);
      add(r, 0, key, k0 > 0 ? state.scale + r : nullptr);
      for (const long end = visible(r + count - 1); key < end; ++key)  // keys that only the later rows see
        add((k0 + key - tile.first_position) * group, key, key + 1, kOnes);
    });
  }

  // `next_tile`: the tile whose first keys are fetched meanwhile (nullable).
  void run(const QueryTile& tile, const QueryTile* next_tile) const {
    const HeadShape& shape = cache.shape;
    const long dim = shape.head_dim, padded = shape.padded_dim(), group = shape.group();
    const long rows = tile.positions * group;
    SoftmaxState state(rows, shape);
    for (long r = 0; r < rows; ++r) {
      const T* q = qkv + (tile.first_row + r / group) * shape.row() + (tile.kv_head * group + r % group) * dim;
      for_vectors(dim, [&](long d, int n) {
        store(state.queries + r * padded + d, load(q + d, n) * splat(score_scale));
      });
    }
    const bool in_place = cache.page_size >= kLanes && (sizeof(T) == sizeof(float) || rows <= kFewRows);
    KeyBlock<T> now = block(tile, 0), next;
    for (long k0 = 0; k0 <= tile.last_position(); k0 += kKeyBlock, now = next) {
      const bool more = k0 + kKeyBlock <= tile.last_position(), fetch = more || next_tile;
      if (fetch) next = more ? block(tile, k0 + kKeyBlock) : block(*next_tile, 0);
      if (in_place)
        absorb_block(tile, now, fetch ? &next : nullptr, k0, state);
      else
        absorb_block(tile, widened_block(tile, k0, state), fetch ? &next : nullptr, k0, state);
    }
    for (long r = 0; r < rows; ++r) {
      const long row = tile.first_row + r / group, head = tile.kv_head * group + r % group;
      const float sum = sum_lanes(load(state.sums + r * kLanes));
      T* target = out + (row * shape.q_heads + head) * dim;
      for_vectors(dim, [&](long d, int n) {
        store(target + d, load(state.out + r * padded + d) / splat(sum), n);
      });
      if (log_sums) log_sums[row * shape.q_heads + head] = state.max[r] + log(sum);
    }
  }

  static constexpr float kOnes[kAttentionRows] = {1.f, 1.f, 1.f, 1.f, 1.f, 1.f};
};

// out[T, q_heads * head_dim]; log_sums_TQ (nullable) [T, q_heads]: natural log of the softmax denominators.
template <class T>
void attention(const T* qkv, T* out, float* log_sums, const Sequences& sequences, const PagedCache<T>& cache,
               float score_scale) {
  const std::vector<QueryTile> tiles = query_tiles(sequences, cache.shape);
  const long count = static_cast<long>(tiles.size());
  double work = 0;
  for (const QueryTile& t : tiles)
    work += 4.0 * t.positions * cache.shape.group() * cache.shape.head_dim * (t.last_position() + 1);
  // Several tiles in a row, so that one can fetch the keys of the next; enough tasks to balance the threads.
  const long per_task = max_threads() == 1 ? count : std::clamp(count / (16l * max_threads()), 1l, 16l);
  const Attention<T> call{qkv, out, log_sums, sequences, cache, score_scale};
  parallel_for(ceil_divide(count, std::max(1l, per_task)), work, Denormals::kept, [&](long task) {
    const long last = std::min(count, (task + 1) * per_task);
    for (long i = task * per_task; i < last; ++i) call.run(tiles[i], i + 1 < last ? &tiles[i + 1] : nullptr);
  });
}

}  // namespace zerogap
