// Causal attention over a paged KV cache: per query row an online softmax over key blocks of 64 at ABSOLUTE positions,
// ascending. So a row's bits do not depend on its batch, on chunking, on the page size or on where its pages lie.
#pragma once

#include <utility>
#include <vector>

#include "gemm.h"
#include "math.h"

namespace zerogap {

constexpr int kKeyBlock = 64;
constexpr int kQueryRows = 48;  // rows (positions x grouped heads) that share one walk over the keys
constexpr int kFewRows = 12;    // up to here pages are read in place; above, a block is widened to fp32 once

// Keys lie transposed: keys [page, kv_head, head_dim, page_size], values [page, kv_head, page_size, value_stride],
// value_stride = head_dim rounded up to 16, the pad written as zero.
struct HeadShape {
  long q_heads, kv_heads, head_dim;
  long group() const { return q_heads / kv_heads; }
  long padded_dim() const { return round_up(head_dim, kLanes); }
  long row() const { return (q_heads + 2 * kv_heads) * head_dim; }
};

template <class T>
struct PagedCache {
  T* keys;
  T* values;
  long page_size;
  HeadShape shape;

  T* key_page(long page, long head) const {
    return keys + (page * shape.kv_heads + head) * shape.head_dim * page_size;
  }
  T* value_page(long page, long head) const {
    return values + (page * shape.kv_heads + head) * page_size * shape.padded_dim();
  }
};

struct Sequences {
  long count;
  const int32_t* starts;           // [count + 1] rows
  const int32_t* first_positions;  // [count]
  const int32_t* pages;            // [count, pages_per_sequence]
  long pages_per_sequence;
};

// Writes the keys and values of fused qkv rows [q heads | k heads | v heads] into their slots; copies [count, 2] are
// (row, slot), further slots for some rows.
template <class T>
void write_cache(const T* qkv, const int32_t* slots, long rows, const int32_t* copies, long copy_count,
                 const PagedCache<T>& cache) {
  const HeadShape& shape = cache.shape;
  const long dim = shape.head_dim, padded = shape.padded_dim();
  parallel_rows(rows + copy_count, 4 * shape.kv_heads * dim, [&](long i) {
    const long row = i < rows ? i : copies[2 * (i - rows)];
    const long slot = i < rows ? slots[i] : copies[2 * (i - rows) + 1];
    const T* key = qkv + row * shape.row() + shape.q_heads * dim;
    const T* value = key + shape.kv_heads * dim;
    const long page = slot / cache.page_size, offset = slot % cache.page_size;
    for (long h = 0; h < shape.kv_heads; ++h, key += dim, value += dim) {
      T* key_column = cache.key_page(page, h) + offset;
      for (long d = 0; d < dim; ++d) key_column[d * cache.page_size] = key[d];
      T* value_row = cache.value_page(page, h) + offset * padded;
      std::memcpy(value_row, value, dim * sizeof(T));
      std::memset(value_row + dim, 0, (padded - dim) * sizeof(T));
    }
  });
}

// Rows of one kv head that walk the keys together. Row r is query head r % group of position first + r / group.
struct QueryTile {
  long sequence, kv_head;
  long first_row, first_position, positions;
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

// State of the online softmax of R rows, in one scratch buffer.
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
    std::fill_n(out, r * dim, 0.f);
    std::fill_n(sums, r * kLanes, 0.f);
    std::fill_n(max, r, -kInfinity);
    std::fill_n(scale, r, 0.f);
  }

  // Scores of one key block become probabilities relative to the new maximum; `scale` rescales what went before.
  void absorb(long rows, long padded_dim) {
    for (long r = 0; r < rows; ++r) {
      const float* s = scores + r * kKeyBlock;
      Vec top = zerogap::max(zerogap::max(load(s), load(s + 16)), zerogap::max(load(s + 32), load(s + 48)));
      const float block_max = max_lanes(top), old_max = max[r];
      if (block_max > old_max) max[r] = block_max;
      scale[r] = old_max - max[r];
    }
    for (long r = 0; r < rows; r += kLanes) store(scale + r, exp(load(scale + r)));
    for (long r = 0; r < rows; ++r) {
      float* s = scores + r * kKeyBlock;
      const Vec shift = splat(max[r]), factor = splat(scale[r]);
      Vec p[4];
      for (int v = 0; v < 4; ++v) {
        p[v] = exp(load(s + v * kLanes) - shift);
        store(s + v * kLanes, p[v]);
      }
      float* sum = sums + r * kLanes;
      store(sum, fma(load(sum), factor, (p[0] + p[1]) + (p[2] + p[3])));
      if (scale[r] != 1.f)
        for (long d = 0; d < padded_dim; d += kLanes)
          store(out + r * padded_dim + d, load(out + r * padded_dim + d) * factor);
    }
  }
};

ZEROGAP_INLINE void prefetch(const void* data, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) prefetch_line(static_cast<const char*>(data) + i);
}

// out[T, q_heads * head_dim]; log_sums_TQ (nullable) [T, q_heads]: natural log of the softmax denominators.
template <class T>
void attention(const T* qkv, T* out, float* log_sums, const Sequences& sequences, const PagedCache<T>& cache,
               float score_scale) {
  const HeadShape shape = cache.shape;
  const long dim = shape.head_dim, padded = shape.padded_dim(), group = shape.group(), page = cache.page_size;
  const std::vector<QueryTile> tiles = query_tiles(sequences, shape);
  double work = 0;
  for (const QueryTile& t : tiles) work += 4.0 * t.positions * group * dim * (t.first_position + t.positions);

  parallel_for(static_cast<long>(tiles.size()), work, Denormals::kept, [&](long index) {
    const QueryTile& tile = tiles[index];
    const long rows = tile.positions * group, last = tile.first_position + tile.positions - 1;
    const int32_t* pages = sequences.pages + tile.sequence * sequences.pages_per_sequence;
    SoftmaxState state(rows, shape);
    auto key_page = [&](long position) { return cache.key_page(pages[position / page], tile.kv_head); };
    auto value_page = [&](long position) { return cache.value_page(pages[position / page], tile.kv_head); };
    const bool wide = sizeof(T) == sizeof(float) && page == kKeyBlock;
    const bool in_place = page >= kLanes && (rows <= kFewRows || wide);

    for (long r = 0; r < rows; ++r) {
      const T* q = qkv + (tile.first_row + r / group) * shape.row() + (tile.kv_head * group + r % group) * dim;
      for_vectors(dim, [&](long d, int n) {
        store(state.queries + r * padded + d, load(q + d, n) * splat(score_scale));
      });
    }
    for (long k0 = 0; k0 <= last; k0 += kKeyBlock) {
      const long keys = std::min<long>(kKeyBlock, last + 1 - k0), next = k0 + kKeyBlock;
      for (long o = 0; o < keys; o += page) {
        const T* source = key_page(k0 + o);
        if (in_place) {
          multiply(rows, page, state.queries, padded, source, page, dim, state.scores + o, kKeyBlock, false);
        } else {
          for (long d = 0; d < dim; ++d)
            for_vectors(page, [&](long j, int n) {
              store(state.keys + d * kKeyBlock + o + j, load(source + d * page + j, n), n);
            });
        }
      }
      if (!in_place)
        multiply(rows, kKeyBlock, state.queries, padded, state.keys, kKeyBlock, dim, state.scores, kKeyBlock, false);
      if (rows <= kFewRows)
        for (long p = next; p <= std::min(last, next + kKeyBlock - 1); p += page)
          prefetch(key_page(p), dim * page * sizeof(T));
      if (next - 1 > tile.first_position)
        for (long r = 0; r < rows; ++r) {  // the future, and slots that nobody has written
          const long visible = std::max(0l, tile.first_position + r / group - k0 + 1);
          for (long j = visible; j < kKeyBlock; ++j) state.scores[r * kKeyBlock + j] = -kInfinity;
        }
      state.absorb(rows, padded);
      if (rows <= kFewRows)
        for (long p = next; p <= std::min(last, next + kKeyBlock - 1); p += page)
          prefetch(value_page(p), padded * page * sizeof(T));
      for (long o = 0; o < keys; o += page) {
        const T* source = value_page(k0 + o);
        const long count = std::min(page, keys - o);
        if (in_place) {
          multiply(rows, padded, state.scores + o, kKeyBlock, source, padded, count, state.out, padded, true);
        } else {
          for (long i = 0; i < count * padded; i += kLanes)
            store(state.values + o * padded + i, load(source + i));
        }
      }
      if (!in_place)
        multiply(rows, padded, state.scores, kKeyBlock, state.values, padded, keys, state.out, padded, true);
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
  });
}

}  // namespace zerogap
