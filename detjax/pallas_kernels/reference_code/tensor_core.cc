// SPDX-License-Identifier: Apache-2.0
// Steps of a tensor core for each width of vectors, and the choice among them.
#include "tensor_core.h"

// The same code for each width of vectors. Target options are in force around it, and not an
// attribute of its functions, because GCC lowers comparisons of vectors before it inlines.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#endif
#define DETJAX_LANES 16
#include "lanes.h"
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define DETJAX_LANES 8
#include "lanes.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
#define DETJAX_LANES 4
#include "lanes.h"

namespace detjax {

Processor processor_of(int most_lanes) {
#if defined(__x86_64__)
  bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (most_lanes >= 16 && has_avx512 && has_avx2) return {16, lanes16::run_tile};
  if (most_lanes >= 8 && has_avx2) return {8, lanes8::run_tile};
#endif
  return {4, lanes4::run_tile};
}

Processor processor = processor_of(16);

}  // namespace detjax

extern "C" {

// Use vectors of at most so many float32, for tests; returns how many are used.
int detjax_choose_lanes(int most) {
  detjax::processor = detjax::processor_of(most);
  return detjax::processor.lanes;
}

// One step of one output by the definition, for tests.
float detjax_exact_step(float accumulator, const float* x, const float* w) {
  return detjax::exact_step(accumulator, x, w, 1);
}
}
