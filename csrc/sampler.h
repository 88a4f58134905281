// Draws a token from logits: Philox4x32-10 keyed by (seed, prompt, sample, position), then the inverse CDF in double.
#pragma once

#include "head.h"

namespace zerogap {

// The counter-based generator of Salmon et al. (2011), 10 rounds.
inline void philox(uint32_t counter[4], uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = 0xD2511F53ull * counter[0], b = 0xCD9E8D57ull * counter[2];
    const uint32_t next0 = static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key0;
    const uint32_t next2 = static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key1;
    counter[1] = static_cast<uint32_t>(b);
    counter[3] = static_cast<uint32_t>(a);
    counter[0] = next0;
    counter[2] = next2;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

// 53 bits in [0, 1) from int64 (seed, prompt id, sample index, position).
inline double uniform(const int64_t key[4]) {
  const uint64_t seed = static_cast<uint64_t>(key[0]), prompt = static_cast<uint64_t>(key[1]);
  uint32_t counter[4] = {static_cast<uint32_t>(prompt), static_cast<uint32_t>(prompt >> 32),
                         static_cast<uint32_t>(key[2]), static_cast<uint32_t>(key[3])};
  philox(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  const uint64_t bits = static_cast<uint64_t>(counter[0]) << 32 | counter[1];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

// exp(logit / temperature - max) of one block into mass; returns their sum (fixed 16-lane order).
inline double block_mass(const float* logits, long count, float inverse_temperature, float max, float* mass) {
  Vec sum = splat(0.f);
  for_vectors(count, [&](long j, int n) {
    Vec p = exp(load(logits + j, n) * splat(inverse_temperature) - splat(max));
    store(mass + j, p);
    for (int i = n; i < kLanes; ++i) mass[j + i] = 0.f;
    sum = sum + load(mass + j);
  });
  return sum_lanes(sum);
}

// The first token whose running sum of mass exceeds u * total; never one without mass. Where mass is NaN: token 0
// (the row's logprob is NaN then, and the engine stops on it).
inline int64_t draw(const float* logits, long vocab, float inverse_temperature, float max, double u) {
  alignas(64) float mass[kVocabularyBlock];
  const long blocks = ceil_divide(vocab, kVocabularyBlock);
  double* sums = scratch<double>(Scratch::tile, blocks);
  double total = 0.0;
  long chosen = 0;  // the last block with mass, in case u * total rounds up to total
  for (long i = 0; i < blocks; ++i) {
    const long first = i * kVocabularyBlock, count = std::min<long>(kVocabularyBlock, vocab - first);
    sums[i] = block_mass(logits + first, count, inverse_temperature, max, mass);
    if (sums[i] > 0.0) chosen = i;
    total += sums[i];
  }
  const double goal = u * total;
  double before = 0.0;
  for (long i = 0; i < chosen; ++i) {
    if (before + sums[i] > goal) chosen = i;
    else before += sums[i];
  }
  const long first = chosen * kVocabularyBlock, count = std::min<long>(kVocabularyBlock, vocab - first);
  block_mass(logits + first, count, inverse_temperature, max, mass);
  long token = 0;  // falls through with the block's last token that has mass if rounding left the goal just above
  for (long j = 0; j < count; ++j) {
    if (!(mass[j] > 0.f)) continue;
    token = first + j;
    before += mass[j];
    if (before > goal) break;
  }
  return token;
}

inline int64_t first_equal(const float* row, long count, float value) {
  for (long j = 0; j < count; ++j)
    if (row[j] == value) return j;
  return 0;
}

// Inverse temperature -1 stands for temperature 0: the largest logit (lowest id on ties), its logprob at temperature 1.
inline void sample(const float* logits_BV, long row_stride, const int64_t* keys_B4, const float* inverse_temperatures_B,
                   int64_t* tokens_B, float* logprobs_B, long rows, long vocab) {
  parallel_for(rows, 40.0 * rows * vocab, Denormals::kept, [&](long r) {
    const float* logits = logits_BV + r * row_stride;
    const bool greedy = inverse_temperatures_B[r] < 0.f;
    const float inverse_temperature = greedy ? 1.f : inverse_temperatures_B[r];
    RunningSoftmax state;
    for (long v = 0; v < vocab; v += kVocabularyBlock)
      state.absorb(logits + v, std::min<long>(kVocabularyBlock, vocab - v), inverse_temperature);
    tokens_B[r] = greedy ? first_equal(logits, vocab, state.max)
                         : draw(logits, vocab, inverse_temperature, state.max, uniform(keys_B4 + 4 * r));
    logprobs_B[r] = logprob(logits[tokens_B[r]], inverse_temperature, state.log_sum());
  });
}

}  // namespace zerogap
