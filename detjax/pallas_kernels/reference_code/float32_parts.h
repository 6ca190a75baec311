// SPDX-License-Identifier: Apache-2.0
// Float32 as the sum of three bfloat16 parts, whose products a tensor core adds.
#pragma once

#include "calls.h"

namespace detjax {
namespace {

constexpr int kParts = 3;

// Which part of the first operand meets which of the second, in order.
constexpr std::pair<int, int> kPairs[] = {{0, 2}, {1, 1}, {2, 0}, {0, 1}, {1, 0}, {0, 0}};

// The greatest part first; each is what is left, to nearest.
inline void split_bf16(float x, uint16_t* parts) {
  for (int i = 0; i < kParts; ++i) {
    parts[i] = round_bf16(x);
    x = x - widen(parts[i]);
  }
}

// Rows [M, K] as parts [3, M, K].
ffi::Error split_rows(ffi::ThreadPool pool, In x, Out parts) {
  const int64_t width = dim(x, 1), size = x.element_count();
  parallel(pool, dim(x, 0), [&](int64_t m) {
    for (int64_t i = m * width; i < (m + 1) * width; ++i) {
      uint16_t own[kParts];
      split_bf16(data<float>(x)[i], own);
      for (int p = 0; p < kParts; ++p) data<uint16_t>(parts)[p * size + i] = own[p];
    }
  });
  return ffi::Error::Success();
}

// out = round(residual + (((p3 + p2) + p1) + bias)), parts [3, M, N]; residual and bias may have no
// elements.
ffi::Error add_parts(ffi::ThreadPool pool, In parts, In residual, In bias, Out out) {
  const int64_t width = dim(parts, 2), size = dim(parts, 1) * width;
  const bool has_residual = residual.element_count(), has_bias = bias.element_count();
  parallel(pool, dim(parts, 1), [&](int64_t m) {
    for (int64_t i = m * width; i < (m + 1) * width; ++i) {
      const float* own = data<float>(parts) + i;
      float sum = (own[2 * size] + own[size]) + own[0];
      if (has_bias) sum = sum + read(bias, i % width);
      if (has_residual) sum = read(residual, i) + sum;
      write(out, i, sum);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace detjax
