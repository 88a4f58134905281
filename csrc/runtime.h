// What surrounds the arithmetic: the floating-point mode, the threads, and reused scratch memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#define ZEROGAP_HAS_MXCSR 1
#endif

namespace zerogap {

enum class Denormals { kept, flushed };

// Pins rounding and denormal handling of the calling thread and restores the caller's mode: a process in which some
// library has set flush-to-zero still gets our bits. `flushed` is for bf16 dot products, because vdpbf16ps flushes.
class FloatMode {
 public:
#if defined(ZEROGAP_HAS_MXCSR)
  explicit FloatMode(Denormals denormals) : saved_(_mm_getcsr()) {
    _mm_setcsr(denormals == Denormals::kept ? 0x1f80u : 0x9fc0u);
    asm volatile("" ::: "memory");  // no arithmetic may move above the change of mode
  }
  ~FloatMode() {
    asm volatile("" ::: "memory");
    _mm_setcsr(saved_);
  }

 private:
  unsigned saved_;
#else
  explicit FloatMode(Denormals) {}
#endif
 public:
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;
};

inline int max_threads() {
#if defined(_OPENMP)
  return omp_in_parallel() ? 1 : omp_get_max_threads();
#else
  return 1;
#endif
}

constexpr double kParallelWork = 1 << 17;  // scalar operations below which waking a second thread costs more

// body(i) for i in [0, count) on any thread, begun in ascending order (so that a body may wait for an earlier one):
// every body writes its own outputs, or in a fixed turn, so the bits cannot depend on the number of threads.
template <class Body>
void parallel_for(long count, double work, Denormals denormals, Body body) {
#if defined(_OPENMP)
  if (count > 1 && work > kParallelWork && max_threads() > 1) {
#pragma omp parallel
    {
      FloatMode mode(denormals);
#pragma omp for schedule(monotonic : dynamic, 1)
      for (long i = 0; i < count; ++i) body(i);
    }
    return;
  }
#else
  (void)work;
#endif
  FloatMode mode(denormals);
  for (long i = 0; i < count; ++i) body(i);
}

// The same over rows in chunks, for cheap row operations.
template <class Body>
void parallel_rows(long rows, long work_per_row, Body body) {
  constexpr long kChunk = 16;
  parallel_for((rows + kChunk - 1) / kChunk, double(rows) * work_per_row, Denormals::kept, [&](long chunk) {
    long last = std::min(rows, (chunk + 1) * kChunk);
    for (long row = chunk * kChunk; row < last; ++row) body(row);
  });
}

// Scratch that a thread keeps between calls (fresh pages cost 15% of a big GEMM). One user per slot at a time.
enum class Scratch { panel, left, tile, attention, logits, gradient, count };

class Workspace {
 public:
  ~Workspace() { std::free(data_); }
  void* reserve(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = (bytes + bytes / 4 + 4095) / 4096 * 4096;
      data_ = std::aligned_alloc(64, size_);
      if (!data_) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

// 64-byte aligned, uninitialised; valid until this thread asks for the same slot again.
template <class T>
T* scratch(Scratch slot, size_t elements) {
  static thread_local Workspace spaces[static_cast<int>(Scratch::count)];
  return static_cast<T*>(spaces[static_cast<int>(slot)].reserve(elements * sizeof(T)));
}

// Asks for a line of memory: to read it soon (into L2), or to write it soon. Any address will do, also one past an
// array. asm: gcc deletes loops that do nothing but __builtin_prefetch.
inline void prefetch_line(const void* line) {
#if defined(ZEROGAP_HAS_MXCSR)
  asm volatile("prefetcht1 (%0)" ::"r"(line));
#else
  __builtin_prefetch(line);
#endif
}
inline void prefetch_line_to_write(const void* line) {
#if defined(ZEROGAP_HAS_MXCSR)
  asm volatile("prefetchw (%0)" ::"r"(line));
#else
  __builtin_prefetch(line, 1);
#endif
}

constexpr long round_up(long n, long multiple) { return (n + multiple - 1) / multiple * multiple; }
constexpr long ceil_divide(long n, long d) { return (n + d - 1) / d; }

}  // namespace zerogap
