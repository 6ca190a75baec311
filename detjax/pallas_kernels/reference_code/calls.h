// SPDX-License-Identifier: Apache-2.0
// What every XLA custom call of the reference kernels is made of: operands, threads, sums in pairs.
#pragma once

#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <type_traits>

#include "float32.h"
#include "tensor_core.h"
#include "xla/ffi/api/ffi.h"

namespace detjax {
namespace {

namespace ffi = xla::ffi;
using In = ffi::AnyBuffer;
using Out = ffi::Result<ffi::AnyBuffer>;

constexpr int kBlock = 128;  // keys of a page and of a step of online softmax; logits of a block

template <class T>
const T* data(const In& x) {
  return static_cast<const T*>(x.untyped_data());
}
template <class T>
T* data(Out& x) {
  return static_cast<T*>(x->untyped_data());
}
bool is_bf16(const In& x) { return x.element_type() == ffi::DataType::BF16; }
bool is_bf16(const Out& x) { return x->element_type() == ffi::DataType::BF16; }

// An element of bfloat16 or float32, and its rounding to either.
float read(const In& x, int64_t i) {
  return is_bf16(x) ? widen(data<uint16_t>(x)[i]) : data<float>(x)[i];
}
void write(Out& x, int64_t i, float value) {
  if (is_bf16(x))
    data<uint16_t>(x)[i] = round_bf16(value);
  else
    data<float>(x)[i] = value;
}

// The same of whole arrays: `job` gets a pointer to bfloat16 or float32.
template <class Job>
void with_elements(const In& x, const Job& job) {
  if (is_bf16(x))
    job(static_cast<uint16_t*>(x.untyped_data()));
  else
    job(static_cast<float*>(x.untyped_data()));
}

struct Nothing {};
template <class Pointer>
constexpr bool kIsThere = !std::is_same_v<Pointer, Nothing*>;

// Or to nothing, where there are no elements.
template <class Job>
void with_elements_if_any(const In& x, const Job& job) {
  if (x.element_count())
    with_elements(x, job);
  else
    job(static_cast<Nothing*>(nullptr));
}

float value_of(uint16_t bf16) { return widen(bf16); }
float value_of(float x) { return x; }

template <class T>
T rounded(float x) {
  if constexpr (std::is_same_v<T, float>) return x;
  return round_bf16(x);
}

int64_t dim(const In& x, int i) { return x.dimensions()[i]; }

// Round to nearest and keep subnormal numbers: XLA flushes them in its threads.
struct ExactFloats {
  fenv_t saved;
  ExactFloats() {
    fegetenv(&saved);
    fesetenv(FE_DFL_ENV);
  }
  ~ExactFloats() { fesetenv(&saved); }
};

// A function of an index, as an address that does not depend on its type: one loop is compiled.
struct AnyJob {
  const void* job;
  void (*call)(const void* job, int64_t i);
};

constexpr int kSpins = 2000;  // some 30 to 80 microseconds

inline void spin() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void run_jobs(ffi::ThreadPool& pool, int64_t count, AnyJob job) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable all_done;
  };
  auto state = std::make_shared<State>();
  auto work = [state, count, job] {  // `job` is called only while it is still there
    ExactFloats exact;
    for (int64_t i; (i = state->next.fetch_add(1)) < count;) {
      job.call(job.job, i);
      if (state->done.fetch_add(1) + 1 == count) {
        std::lock_guard<std::mutex> lock(state->mutex);
        state->all_done.notify_all();
      }
    }
  };
  int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(decltype(work)(work));
  work();
  // WHY: to sleep and be woken takes longer than what is left of most operations.
  for (int i = 0; i < kSpins && state->done.load() != count; ++i) spin();
  if (state->done.load() == count) return;
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_done.wait(lock, [&] { return state->done.load() == count; });
}

// Run `job(i)` for i < count on the caller's thread and those of XLA that are free. No result
// depends on which thread runs a job.
template <class Job>
void parallel(ffi::ThreadPool& pool, int64_t count, const Job& job) {
  run_jobs(pool, count,
           {&job, [](const void* it, int64_t i) { (*static_cast<const Job*>(it))(i); }});
}

// The same for `job(m, first, end)` on pieces of `width` elements of `count` rows.
template <class Job>
void parallel_pieces(ffi::ThreadPool& pool, int64_t count, int64_t width, int64_t piece,
                     const Job& job) {
  const int64_t pieces = (width + piece - 1) / piece;
  parallel(pool, count * pieces, [&](int64_t i) {
    const int64_t first = i % pieces * piece;
    job(i / pieces, first, std::min(width, first + piece));
  });
}

constexpr int32_t kZeros = -1;  // the place of a row of zeros

// Rows of x [M, ...] that are not those before them, nor bfloat16 zeros where those are to be left
// out. The padding of a step is one row many times, and that of a prefill is zeros of either sign.
struct DistinctRows {
  std::vector<int32_t> rows;   // of x
  std::vector<int32_t> place;  // [M], of the equal one in `rows`, or kZeros
  bool has_zeros = false;

  explicit DistinctRows(const In& x, bool leaves_zeros = false) {
    const int64_t count = dim(x, 0);
    const size_t bytes = count ? x.size_bytes() / count : 0;
    const char* row = data<char>(x);
    for (int64_t m = 0; m < count; ++m, row += bytes) {
      if (m && !std::memcmp(row - bytes, row, bytes)) {
        place.push_back(place.back());
      } else if (leaves_zeros && are_zeros(row, bytes / 2)) {
        place.push_back(kZeros);
        has_zeros = true;
      } else {
        place.push_back(int32_t(rows.size()));
        rows.push_back(int32_t(m));
      }
    }
  }
  int64_t count() const { return int64_t(rows.size()); }

  // Give each row of `out` what has been computed for the equal one.
  void copy(Out& out) const {
    const size_t bytes = place.empty() ? 0 : out->size_bytes() / place.size();
    char* row = data<char>(out);
    for (size_t m = 0; m < place.size(); ++m)
      if (rows[place[m]] != int32_t(m))
        std::memcpy(row + m * bytes, row + rows[place[m]] * bytes, bytes);
  }

 private:
  static bool are_zeros(const char* row, size_t count) {
    const uint16_t* bf16 = reinterpret_cast<const uint16_t*>(row);
    return std::all_of(bf16, bf16 + count, [](uint16_t u) { return !(u & 0x7fff); });
  }
};

// Pairs, pairs of pairs, ...; an odd one out waits for the next round.
float pairwise(float* terms, int64_t count) {
  while (count > 1) {
    int64_t pairs = count / 2;
    for (int64_t i = 0; i < pairs; ++i) terms[i] = terms[2 * i] + terms[2 * i + 1];
    if (count % 2) terms[pairs] = terms[count - 1];
    count = pairs + count % 2;
  }
  return terms[0];
}

// The same of `count` rows of `size` terms, element by element, into the first row.
void pairwise_rows(float* rows, int64_t count, int64_t size) {
  while (count > 1) {
    int64_t pairs = count / 2;
    for (int64_t i = 0; i < pairs; ++i)
      for (int64_t j = 0; j < size; ++j)
        rows[i * size + j] = rows[2 * i * size + j] + rows[(2 * i + 1) * size + j];
    if (count % 2) std::memcpy(rows + pairs * size, rows + (count - 1) * size, 4 * size);
    count = pairs + count % 2;
  }
}

}  // namespace
}  // namespace detjax
