// The interface between the Python module and the kernel libraries: one table of plain function pointers.
// Each instruction set is a shared library of its own that exports `zerogap_kernel_table`.
#pragma once

#include <cstdint>

namespace zerogap {

constexpr int kTableVersion = 2;

// dtype: 0 fp32, 1 bf16. layout: 0 packed panels, 1 rows [N, K]. All arrays contiguous; pointers marked `null` may be.
// The names of dimensions are those of zerogap/kernels/interface.py.
struct KernelTable {
  int version;
  const char* name;

  void (*pack)(int dtype, const void* weight_NK, void* panels, long n, long k);
  // out_fp32: y stays fp32 although dtype is bf16 (logits). null: bias.
  void (*linear)(int dtype, bool out_fp32, int layout, const void* x_MK, const void* weight, const void* bias_N,
                 void* y_MN, long m, long n, long k);
  void (*linear_input_gradient)(int dtype, const void* dy_MN, const void* weight_NK, void* dx_MK, long m, long n,
                                long k);
  void (*linear_weight_gradient)(int dtype, const void* dy_MN, const void* x_MK, float* dweight_NK, long m, long n,
                                 long k);
  void (*column_sum)(int dtype, const void* dy_MN, float* total_N, long m, long n);

  // null: residual (then sum_out too).
  void (*rms_norm)(int dtype, const void* x, const void* residual, void* sum_out, const void* weight, void* y,
                   long rows, long width, float eps);
  void (*rms_norm_backward)(int dtype, const void* x, const void* weight, const void* dy, const void* dsum, void* dx,
                            float* dweight, long rows, long width, float eps);
  void (*head_norm)(int dtype, const void* qkv, const void* q_weight, const void* k_weight, void* out, long rows,
                    long q_heads, long kv_heads, long head_dim, float eps);
  void (*head_norm_backward)(int dtype, const void* qkv, const void* q_weight, const void* k_weight, const void* dy,
                             void* dqkv, float* dweights, long rows, long q_heads, long kv_heads, long head_dim,
                             float eps);

  void (*embedding)(int dtype, const void* table_VH, const int64_t* tokens, void* out, long rows, long vocab,
                    long width);
  void (*embedding_backward)(int dtype, const void* dy, const int64_t* tokens, float* dtable, long rows, long vocab,
                             long width);
  void (*rotary)(int dtype, const void* in, void* out, const float* cos, const float* sin, const int32_t* positions,
                 long rows, long heads, long row_width, long head_dim, float sign);
  void (*silu_mul)(int dtype, const void* gate_up, void* out, long rows, long width);
  void (*silu_mul_backward)(int dtype, const void* gate_up, const void* dy, void* dgate_up, long rows, long width);

  // Writes keys and values of the rows into the cache (copies [copy_count, 2]: row, further slot), then attends.
  // null: log_sums; copies where copy_count is 0.
  void (*attention)(int dtype, const void* qkv, void* out, float* log_sums, long rows, long sequences,
                    const int32_t* starts, const int32_t* first_positions, const int32_t* pages,
                    long pages_per_sequence, const int32_t* slots, const int32_t* copies, long copy_count, void* keys,
                    void* values, long page_size, long q_heads, long kv_heads, long head_dim, float score_scale);
  // The key of row t is seen by the rows t .. key_ends[t] - 1.
  void (*attention_backward)(int dtype, const void* qkv, const void* out, const float* log_sums, const void* dout,
                             void* dqkv, long rows, const int32_t* key_ends, long q_heads, long kv_heads,
                             long head_dim, float score_scale);

  // n: columns of the vocabulary that count. null: log_sums.
  void (*head_logprobs)(int dtype, int layout, const void* hidden_MK, const void* weight, const int64_t* targets,
                        float inverse_temperature, float* logprobs, float* log_sums, long m, long n, long k);
  // null: dhidden, dweight.
  void (*head_backward)(int dtype, const void* hidden_MK, const void* weight_VK, const int64_t* targets,
                        const float* log_sums, const float* dlogprobs, float inverse_temperature, void* dhidden,
                        float* dweight, long m, long n, long k);
  // inverse_temperatures: 1 / temperature of each row; -1 for temperature 0.
  void (*sample)(const float* logits_BV, long row_stride, const int64_t* keys_B4, const float* inverse_temperatures,
                 int64_t* tokens, float* logprobs, long rows, long vocab);

  // For the accuracy tests.
  void (*exp)(const float* x, float* y, long count);
  void (*log)(const float* x, float* y, long count);
};

}  // namespace zerogap
