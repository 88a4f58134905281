// A recorded forward pass of the engine: calls of the kernel table, in order, that differ from step to step only in
// what a batch supplies (its sizes, its tokens, its pages). Replaying them is one call; the kernels and so the bits are
// the same.
#pragma once

#include <array>
#include <functional>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "runtime.h"
#include "table.h"

namespace zerogap {

// Addresses travel as integers, see native.cpp.
template <class T>
using Argument = std::conditional_t<std::is_pointer_v<T>, uintptr_t, T>;

template <class T>
T pass(Argument<T> value) {
  if constexpr (std::is_pointer_v<T>)
    return reinterpret_cast<T>(value);
  else
    return value;
}

// What a recorded call reads only when it is replayed: an array of the batch or a buffer, and a size of the batch.
struct Address {
  int index;
};
struct Size {
  int index;
};
template <class T>
using Operand = std::variant<Argument<T>, std::conditional_t<std::is_pointer_v<T>, Address, Size>>;

// One engine step: S sequences one after another, T rows, B of which ask for a token; see StepBatch in
// zerogap/kernels/step.py.
struct Step {
  std::vector<int64_t> tokens_T;
  std::vector<int32_t> first_positions_S, lengths_S;
  std::vector<std::vector<int32_t>> page_tables_S;
  std::vector<int64_t> asked_B;
  std::vector<std::array<int64_t, 4>> keys_B;
  std::vector<float> inverse_temperatures_B;  // negative: see sampler.h
};

class Program {
 public:
  static constexpr const char* kArrays[] = {"tokens", "positions", "starts", "first_positions",      "pages", "slots",
                                            "asked",  "keys",      "inverse_temperatures", "drawn", "logprobs"};
  static constexpr const char* kSizes[] = {"rows", "sequences", "pages_per_sequence", "asked"};

  Program(const KernelTable* table, long page_size)
      : table_(table), page_size_(page_size), addresses_(std::size(kArrays)) {}
  Program(const Program&) = delete;  // the calls hold `this`
  Program& operator=(const Program&) = delete;

  Address array(const std::string& name) const { return {find(kArrays, name)}; }
  Size size(const std::string& name) const { return {find(kSizes, name)}; }

  // Memory of `bytes` for each unit of `count`, kept from step to step.
  Address buffer(long bytes, Size count) {
    buffers_.push_back({bytes, count.index, std::make_unique<Workspace>()});
    addresses_.push_back(nullptr);
    return {static_cast<int>(addresses_.size()) - 1};
  }

  template <class... Args>
  void append(void (*KernelTable::*entry)(Args...), const Operand<Args>&... operands) {
    calls_.push_back([this, entry, operands...] { (table_->*entry)(value<Args>(operands)...); });
  }

  // The calls on this step; returns the tokens and logprobs of the rows that ask.
  std::pair<std::vector<int64_t>, std::vector<float>> run(Step step) {
    lay_out(step);
    std::vector<int64_t> drawn_B(step.asked_B.size());
    std::vector<float> logprobs_B(drawn_B.size());
    void* const arrays[] = {step.tokens_T.data(),  positions_T_.data(),   starts_Sp1_.data(),
                            step.first_positions_S.data(), pages_SP_.data(), slots_T_.data(),
                            step.asked_B.data(),   step.keys_B.data(),    step.inverse_temperatures_B.data(),
                            drawn_B.data(),        logprobs_B.data()};
    static_assert(std::size(arrays) == std::size(kArrays));
    std::copy(std::begin(arrays), std::end(arrays), addresses_.begin());
    for (size_t i = 0; i < buffers_.size(); ++i)
      addresses_[std::size(kArrays) + i] = buffers_[i].memory->reserve(buffers_[i].bytes * sizes_[buffers_[i].count]);
    for (const auto& call : calls_) call();
    return {std::move(drawn_B), std::move(logprobs_B)};
  }

 private:
  struct Buffer {
    long bytes;
    int count;  // index of the size
    std::unique_ptr<Workspace> memory;
  };

  template <size_t N>
  static int find(const char* const (&names)[N], const std::string& name) {
    for (size_t i = 0; i < N; ++i)
      if (name == names[i]) return static_cast<int>(i);
    throw std::invalid_argument("kernels: a program has no '" + name + "'");
  }

  template <class T>
  T value(const Operand<T>& operand) const {
    if (operand.index() == 0) return pass<T>(std::get<0>(operand));
    const int index = std::get<1>(operand).index;
    if constexpr (std::is_pointer_v<T>)
      return static_cast<T>(addresses_[index]);
    else
      return static_cast<T>(sizes_[index]);
  }

  // Sizes, positions, slots and the rectangular page table of the step. The kernels trust addresses, so the sizes are
  // checked here. Page numbers are not: only their owner, the engine, knows how many there are.
  void lay_out(const Step& step) {
    const size_t sequences = step.lengths_S.size(), asked = step.asked_B.size();
    if (step.first_positions_S.size() != sequences || step.page_tables_S.size() != sequences ||
        step.keys_B.size() != asked || step.inverse_temperatures_B.size() != asked)
      throw std::invalid_argument("kernels: the lists of a step differ in length");
    positions_T_.clear();
    slots_T_.clear();
    starts_Sp1_.assign(1, 0);
    size_t width = 0;
    for (size_t s = 0; s < sequences; ++s) {
      const std::vector<int32_t>& table = step.page_tables_S[s];
      const int32_t first = step.first_positions_S[s], last = first + step.lengths_S[s];
      if (first < 0 || last <= first || static_cast<size_t>(last) > table.size() * page_size_)
        throw std::invalid_argument("kernels: a sequence of a step has no rows, or rows without a page");
      for (int32_t p = first; p < last; ++p) {
        positions_T_.push_back(p);
        slots_T_.push_back(table[p / page_size_] * page_size_ + p % page_size_);
      }
      starts_Sp1_.push_back(static_cast<int32_t>(positions_T_.size()));
      width = std::max(width, table.size());
    }
    if (positions_T_.size() != step.tokens_T.size())
      throw std::invalid_argument("kernels: a step has more or fewer tokens than rows");
    for (int64_t row : step.asked_B)
      if (row < 0 || static_cast<size_t>(row) >= step.tokens_T.size())
        throw std::invalid_argument("kernels: a step asks for a row that it does not compute");
    pages_SP_.assign(sequences * width, 0);
    for (size_t s = 0; s < sequences; ++s)
      std::copy(step.page_tables_S[s].begin(), step.page_tables_S[s].end(), pages_SP_.begin() + s * width);
    const size_t sizes[] = {step.tokens_T.size(), sequences, width, asked};
    static_assert(std::size(sizes) == std::size(kSizes));
    std::copy(std::begin(sizes), std::end(sizes), sizes_);
  }

  const KernelTable* const table_;
  const long page_size_;
  long sizes_[std::size(kSizes)] = {};
  std::vector<void*> addresses_;  // the arrays of kArrays, then the buffers
  std::vector<Buffer> buffers_;
  std::vector<std::function<void()>> calls_;
  std::vector<int32_t> positions_T_, starts_Sp1_, pages_SP_, slots_T_;
};

}  // namespace zerogap
