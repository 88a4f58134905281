// The paged KV cache as the kernels see it, and how new rows get into it. Attention itself is in attention.h.
#pragma once

#include "tile.h"

namespace zerogap {

constexpr int kKeyBlock = 64;                       // keys per step of the online softmax, at absolute positions
constexpr int kKeyGroups = kKeyBlock / kLanes;      // a group: 16 keys that lie side by side in one page

struct HeadShape {
  long q_heads, kv_heads, head_dim;
  long group() const { return q_heads / kv_heads; }
  long padded_dim() const { return round_up(head_dim, kLanes); }
  long row() const { return (q_heads + 2 * kv_heads) * head_dim; }
};

// Keys lie transposed: keys [page, kv_head, head_dim, page_size], values [page, kv_head, page_size, value_stride],
// value_stride = head_dim rounded up to 16, the pad written as zero.
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

// target[d][i] = source[i][d] for 16 rows i.
template <class T>
void transpose_keys(const T* source, long source_stride, long dim, T* target, long target_stride) {
  long d = 0;
  if (sizeof(T) * source_stride % 4 == 0)
    for (; d + kLineColumns<T> <= dim; d += kLineColumns<T>)
      transpose_lines(source + d, source_stride, target + d * target_stride, target_stride);
  for (; d < dim; ++d)
    for (long i = 0; i < 16; ++i) target[d * target_stride + i] = source[i * source_stride + d];
}

// Writes the keys and values of fused qkv rows [q heads | k heads | v heads] into their slots; copies [count, 2] are
// (row, slot), further slots for some rows.
template <class T>
void write_cache(const T* qkv, const int32_t* slots, long rows, const int32_t* copies, long copy_count,
                 const PagedCache<T>& cache) {
  const HeadShape& shape = cache.shape;
  const long dim = shape.head_dim, padded = shape.padded_dim(), page_size = cache.page_size;
  const double work_per_row = 4.0 * shape.kv_heads * dim;
  auto key_column = [&](long slot, long h) { return cache.key_page(slot / page_size, h) + slot % page_size; };
  auto write = [&](long row, long slot, long count) {  // count 1, or 16 rows into one whole group of 16 keys
    const T* key = qkv + row * shape.row() + shape.q_heads * dim;
    for (long h = 0; h < shape.kv_heads; ++h, key += dim) {
      T* column = key_column(slot, h);
      if (count == kLanes)
        transpose_keys(key, shape.row(), dim, column, page_size);
      else
        for (long d = 0; d < dim; ++d) column[d * page_size] = key[d];
      T* value_row = cache.value_page(slot / page_size, h) + slot % page_size * padded;
      for (long i = 0; i < count; ++i, value_row += padded) {
        std::memcpy(value_row, key + i * shape.row() + shape.kv_heads * dim, dim * sizeof(T));
        std::memset(value_row + dim, 0, (padded - dim) * sizeof(T));
      }
    }
  };
  auto fills_group = [&](long row, long last) {
    if (row + kLanes > last || page_size < kLanes || slots[row] % kLanes != 0) return false;
    for (long i = 1; i < kLanes; ++i)
      if (slots[row + i] != slots[row] + i) return false;
    return true;
  };
  constexpr long kChunk = 64;
  parallel_for(ceil_divide(rows, kChunk), rows * work_per_row, Denormals::kept, [&](long chunk) {
    const long last = std::min(rows, (chunk + 1) * kChunk);
    for (long row = chunk * kChunk, count; row < last; row += count) {
      count = fills_group(row, last) ? kLanes : 1;
      if (count == 1 && row + 1 < last)  // decode: each row writes to pages that are in no cache yet
        for (long h = 0; h < shape.kv_heads; ++h)
          for (long d = 0; d < dim; ++d) prefetch_line(key_column(slots[row + 1], h) + d * page_size);
      write(row, slots[row], count);
    }
  });
  parallel_for(copy_count, copy_count * work_per_row, Denormals::kept,
               [&](long i) { write(copies[2 * i], copies[2 * i + 1], 1); });
}

}  // namespace zerogap
