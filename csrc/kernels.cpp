// One instruction set's kernel library: instantiates every kernel for fp32 and bf16 and exports them as a table.
// CMake compiles this file several times, with other flags and another ZEROGAP_VARIANT each time.
#include "table.h"

#include "attention_backward.h"
#include "elementwise.h"
#include "head.h"
#include "norm.h"
#include "sampler.h"

namespace zerogap {
namespace {

// A pointer without type that becomes the pointer a kernel asks for.
struct Any {
  const void* data;
  template <class T>
  operator T*() const {
    return const_cast<T*>(static_cast<const T*>(data));
  }
};

// Calls body with a value of the element type that `dtype` names.
template <class Body>
void with_type(int dtype, Body body) {
  if (dtype == 0)
    body(float{});
  else
    body(bf16{});
}

template <class T>
Right<T> weight_operand(const void* data, int layout, long n, long k) {
  return {data, static_cast<Layout>(layout), n, k, k};
}

void pack(int dtype, const void* weight, void* panels, long n, long k) {
  with_type(dtype, [&](auto t) {
    using T = decltype(t);
    pack_panels<T>(Any{weight}, Any{panels}, n, k);
  });
}

void linear_entry(int dtype, bool out_fp32, int layout, const void* x, const void* weight, const void* bias, void* y,
                  long m, long n, long k) {
  with_type(dtype, [&](auto t) {
    using T = decltype(t);
    const Right<T> right = weight_operand<T>(weight, layout, n, k);
    if (out_fp32)
      linear<T, float>(Any{x}, right, Any{bias}, Any{y}, m);
    else
      linear<T, T>(Any{x}, right, Any{bias}, Any{y}, m);
  });
}

// Entries that only choose the element type: the kernel's remaining arguments pass through.
#define ZEROGAP_BY_TYPE(kernel, ...)        \
  with_type(dtype, [&](auto t) {            \
    using T = decltype(t);                  \
    kernel<T>(__VA_ARGS__);                 \
  })

void linear_input_gradient_entry(int dtype, const void* dy, const void* weight, void* dx, long m, long n, long k) {
  ZEROGAP_BY_TYPE(linear_input_gradient, Any{dy}, Any{weight}, Any{dx}, m, n, k);
}
void linear_weight_gradient_entry(int dtype, const void* dy, const void* x, float* dweight, long m, long n, long k) {
  ZEROGAP_BY_TYPE(linear_weight_gradient, Any{dy}, Any{x}, dweight, m, n, k);
}
void column_sum_entry(int dtype, const void* dy, float* total, long m, long n) {
  ZEROGAP_BY_TYPE(column_sum, Any{dy}, total, m, n);
}
void rms_norm_entry(int dtype, const void* x, const void* residual, void* sum, const void* weight, void* y, long rows,
                    long width, float eps) {
  ZEROGAP_BY_TYPE(rms_norm, Any{x}, Any{residual}, Any{sum}, Any{weight}, Any{y}, rows, width, eps);
}
void rms_norm_backward_entry(int dtype, const void* x, const void* weight, const void* dy, const void* dsum, void* dx,
                             float* dweight, long rows, long width, float eps) {
  ZEROGAP_BY_TYPE(rms_norm_backward, Any{x}, Any{weight}, Any{dy}, Any{dsum}, Any{dx}, dweight, rows, width, eps);
}
void head_norm_entry(int dtype, const void* qkv, const void* q_weight, const void* k_weight, void* out, long rows,
                     long q_heads, long kv_heads, long dim, float eps) {
  ZEROGAP_BY_TYPE(head_norm, Any{qkv}, Any{q_weight}, Any{k_weight}, Any{out}, rows, q_heads, kv_heads, dim, eps);
}
void head_norm_backward_entry(int dtype, const void* qkv, const void* q_weight, const void* k_weight, const void* dy,
                              void* dqkv, float* dweights, long rows, long q_heads, long kv_heads, long dim,
                              float eps) {
  ZEROGAP_BY_TYPE(head_norm_backward, Any{qkv}, Any{q_weight}, Any{k_weight}, Any{dy}, Any{dqkv}, dweights, rows,
                  q_heads, kv_heads, dim, eps);
}
void embedding_entry(int dtype, const void* table, const int64_t* tokens, void* out, long rows, long vocab,
                     long width) {
  ZEROGAP_BY_TYPE(embedding, Any{table}, tokens, Any{out}, rows, vocab, width);
}
void embedding_backward_entry(int dtype, const void* dy, const int64_t* tokens, float* dtable, long rows, long vocab,
                              long width) {
  ZEROGAP_BY_TYPE(embedding_backward, Any{dy}, tokens, dtable, rows, vocab, width);
}
void rotary_entry(int dtype, const void* in, void* out, const float* cos, const float* sin, const int32_t* positions,
                  long rows, long heads, long row_width, long dim, float sign) {
  ZEROGAP_BY_TYPE(rotary, Any{in}, Any{out}, cos, sin, positions, rows, heads, row_width, dim, sign);
}
void silu_mul_entry(int dtype, const void* gate_up, void* out, long rows, long width) {
  ZEROGAP_BY_TYPE(silu_mul, Any{gate_up}, Any{out}, rows, width);
}
void silu_mul_backward_entry(int dtype, const void* gate_up, const void* dy, void* dgate_up, long rows, long width) {
  ZEROGAP_BY_TYPE(silu_mul_backward, Any{gate_up}, Any{dy}, Any{dgate_up}, rows, width);
}

void attention_entry(int dtype, const void* qkv, void* out, float* log_sums, long rows, long sequences,
                     const int32_t* starts, const int32_t* first_positions, const int32_t* pages,
                     long pages_per_sequence, const int32_t* slots, const int32_t* copies, long copy_count,
                     void* keys, void* values, long page_size, long q_heads, long kv_heads, long dim,
                     float score_scale) {
  with_type(dtype, [&](auto t) {
    using T = decltype(t);
    const PagedCache<T> cache{Any{keys}, Any{values}, page_size, {q_heads, kv_heads, dim}};
    write_cache<T>(Any{qkv}, slots, rows, copies, copy_count, cache);
    attention<T>(Any{qkv}, Any{out}, log_sums, {sequences, starts, first_positions, pages, pages_per_sequence}, cache,
                 score_scale);
  });
}
void attention_backward_entry(int dtype, const void* qkv, const void* out, const float* log_sums, const void* dout,
                              void* dqkv, long rows, const int32_t* key_ends, long q_heads, long kv_heads, long dim,
                              float score_scale) {
  const HeadShape shape{q_heads, kv_heads, dim};
  ZEROGAP_BY_TYPE(attention_backward, Any{qkv}, Any{out}, log_sums, Any{dout}, Any{dqkv}, rows, key_ends, shape,
                  score_scale);
}
void head_logprobs_entry(int dtype, int layout, const void* hidden, const void* weight, const int64_t* targets,
                         float inverse_temperature, float* logprobs, float* log_sums, long m, long n, long k) {
  ZEROGAP_BY_TYPE(head_logprobs, Any{hidden}, weight_operand<T>(weight, layout, n, k), targets, inverse_temperature,
                  logprobs, log_sums, m);
}
void head_backward_entry(int dtype, const void* hidden, const void* weight, const int64_t* targets,
                         const float* log_sums, const float* dlogprobs, float inverse_temperature, void* dhidden,
                         float* dweight, long m, long n, long k) {
  ZEROGAP_BY_TYPE(head_backward, Any{hidden}, Any{weight}, targets, log_sums, dlogprobs, inverse_temperature,
                  Any{dhidden}, dweight, m, n, k);
}
#undef ZEROGAP_BY_TYPE

void exp_entry(const float* x, float* y, long count) {
  FloatMode mode(Denormals::kept);
  for_vectors(count, [&](long j, int n) { store(y + j, exp(load(x + j, n)), n); });
}
void log_entry(const float* x, float* y, long count) {
  for (long j = 0; j < count; ++j) y[j] = log(x[j]);
}

const KernelTable table = {
    kTableVersion,
    ZEROGAP_VARIANT,
    pack,
    linear_entry,
    linear_input_gradient_entry,
    linear_weight_gradient_entry,
    column_sum_entry,
    rms_norm_entry,
    rms_norm_backward_entry,
    head_norm_entry,
    head_norm_backward_entry,
    embedding_entry,
    embedding_backward_entry,
    rotary_entry,
    silu_mul_entry,
    silu_mul_backward_entry,
    attention_entry,
    attention_backward_entry,
    head_logprobs_entry,
    head_backward_entry,
    sample,
    exp_entry,
    log_entry,
};

}  // namespace
}  // namespace zerogap

extern "C" __attribute__((visibility("default"))) const zerogap::KernelTable* zerogap_kernel_table() {
  return &zerogap::table;
}
