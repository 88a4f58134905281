// The output head: log-softmax over fixed vocabulary blocks of 512, fused with the head's GEMM for the learner.
// Sampler and learner share RunningSoftmax and `logprob`, so the two cannot disagree in a bit.
#pragma once

#include "gemm.h"
#include "math.h"

namespace zerogap {

constexpr int kVocabularyBlock = 512;
constexpr int kHeadRows = 384;  // rows whose block of logits stays in L2

// Log of a sum of exponentials, built block by block in ascending order.
struct RunningSoftmax {
  float max = -kInfinity;
  float sums[kLanes] = {};

  // The next block of at most 512 raw logits; each is multiplied once by 1 / temperature, also at temperature 1.
  void absorb(const float* logits, long count, float inverse_temperature) {
    alignas(64) float scaled[kVocabularyBlock];
    Vec top = splat(-kInfinity);
    for_vectors(count, [&](long j, int n) {
      store(scaled + j, load(logits + j, n) * splat(inverse_temperature));
      for (int i = n; i < kLanes; ++i) scaled[j + i] = -kInfinity;
      top = zerogap::max(top, load(scaled + j));
    });
    const float block_max = max_lanes(top);
    const float new_max = block_max > max ? block_max : max;
    const float shift = new_max == -kInfinity ? 0.f : new_max;  // all -inf so far: mass 0, not NaN
    Vec partial[4] = {splat(0.f), splat(0.f), splat(0.f), splat(0.f)};
    for (long j = 0; j < count; j += kLanes) {
      Vec& sum = partial[j / kLanes % 4];
      sum = sum + exp(load(scaled + j) - splat(shift));
    }
    Vec block_sum = (partial[0] + partial[1]) + (partial[2] + partial[3]);
    store(sums, fma(load(sums), splat(exp(max - shift)), block_sum));
    max = new_max;
  }

  float log_sum() const { return max + log(sum_lanes(load(sums))); }
};

inline float logprob(float target_logit, float inverse_temperature, float log_sum) {
  return target_logit * inverse_temperature - log_sum;
}

// logprobs_M and log_sums_M (of logits / temperature) without ever holding more than 384 x 512 logits per thread.
template <class T>
void head_logprobs(const T* hidden_MK, const Right<T>& weight, const int64_t* targets_M, float inverse_temperature,
                   float* logprobs_M, float* log_sums_M, long m) {
  long lda;
  const T* left = padded_left(hidden_MK, m, weight.k, &lda, Scratch::left);
  const long rows = std::min<long>(kHeadRows, std::max(1l, ceil_divide(m, max_threads())));
  const Denormals dot_mode = PanelTraits<T>::kStep == 2 ? Denormals::flushed : Denormals::kept;
  parallel_for(ceil_divide(m, rows), 2.0 * m * weight.n * weight.k, Denormals::kept, [&](long task) {
    const long first = task * rows, count = std::min(rows, m - first);
    float* tile_MV = scratch<float>(Scratch::tile, count * kVocabularyBlock);
    RunningSoftmax states[kHeadRows];
    float target_logits[kHeadRows];
    std::fill_n(target_logits, count, __builtin_nanf(""));  // stays NaN for a target outside the vocabulary
    for (long v0 = 0; v0 < weight.n; v0 += kVocabularyBlock) {
      const long width = std::min<long>(kVocabularyBlock, weight.n - v0);
      {
        FloatMode mode(dot_mode);
        const Panels<T> panels = weight.panels(v0 / kPanelColumns, ceil_divide(v0 + width, kPanelColumns), 0,
                                               panel_steps<T>(weight.k));
        rows_times_panels<T, float>(left + first * lda, lda, count, panels, width, nullptr, tile_MV, kVocabularyBlock,
                                    false);
      }
      for (long r = 0; r < count; ++r) {
        const float* logits = tile_MV + r * kVocabularyBlock;
        const int64_t target = targets_M[first + r] - v0;
        if (target >= 0 && target < width) target_logits[r] = logits[target];
        states[r].absorb(logits, width, inverse_temperature);
      }
    }
    for (long r = 0; r < count; ++r) {
      const float log_sum = states[r].log_sum();
      logprobs_M[first + r] = logprob(target_logits[r], inverse_temperature, log_sum);
      if (log_sums_M) log_sums_M[first + r] = log_sum;
    }
  });
}

ZEROGAP_INLINE void put(float* p, float x) { *p = x; }
ZEROGAP_INLINE void put(bf16* p, float x) { *p = narrow(x); }

// dlogits = (onehot - softmax) / temperature * dlogprob, one vocabulary block for all rows at a time; from it the
// gradients of hidden (nullable) and weight (nullable, [vocab, K]). Recomputes the logits; holds M x 512 of them.
template <class T>
void head_backward(const T* hidden_MK, const T* weight_VK, const int64_t* targets_M, const float* log_sums_M,
                   const float* dlogprobs_M, float inverse_temperature, T* dhidden_MK, float* dweight_VK, long m,
                   long vocab, long k) {
  if (m == 0) return;
  long lda;
  const T* left = padded_left(hidden_MK, m, k, &lda, Scratch::tile);
  float* logits = scratch<float>(Scratch::logits, m * kVocabularyBlock);
  T* dlogits = scratch<T>(Scratch::gradient, m * kVocabularyBlock);
  float* dhidden = nullptr;
  if (dhidden_MK) dhidden = scratch<float>(Scratch::attention, m * k);
  for (long v0 = 0; v0 < vocab; v0 += kVocabularyBlock) {
    const long width = std::min<long>(kVocabularyBlock, vocab - v0);
    const T* weight = weight_VK + v0 * k;
    gemm<T, float>(left, lda, Right<T>{weight, Layout::nk, width, k, k}, nullptr, logits, kVocabularyBlock, m, false);
    parallel_rows(m, width * 20, [&](long r) {
      const float* row = logits + r * kVocabularyBlock;
      T* out = dlogits + r * kVocabularyBlock;
      const float scale = inverse_temperature * dlogprobs_M[r];
      for_vectors(width, [&](long j, int n) {
        Vec p = exp(load(row + j, n) * splat(inverse_temperature) - splat(log_sums_M[r]));
        store(out + j, p * splat(-scale), n);
      });
      const int64_t target = targets_M[r] - v0;
      if (target >= 0 && target < width) {
        const float p = exp(row[target] * inverse_temperature - log_sums_M[r]);
        put(out + target, (1.f - p) * scale);
      }
      if (width % 2) put(out + width, 0.f);  // the pad of a last, odd pair
    });
    if (dhidden)
      gemm<T, float>(dlogits, kVocabularyBlock, Right<T>{weight, Layout::kn, k, width, k}, nullptr, dhidden, k, m,
                     v0 > 0);
    if (dweight_VK) {
      const long padded = left_stride<T>(m);
      T* dlogits_VM = scratch<T>(Scratch::left, kVocabularyBlock * padded);
      transpose_rows(dlogits, m, kVocabularyBlock, dlogits_VM, padded);
      gemm<T, float>(dlogits_VM, padded, Right<T>{hidden_MK, Layout::kn, k, m, k}, nullptr, dweight_VK + v0 * k, k,
                     width, false);
    }
  }
  if (dhidden)
    parallel_rows(m, k, [&](long r) {
      for_vectors(k, [&](long j, int n) { store(dhidden_MK + r * k + j, load(dhidden + r * k + j, n), n); });
    });
}

}  // namespace zerogap
