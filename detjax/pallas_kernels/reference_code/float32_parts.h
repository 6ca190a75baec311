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

}  // namespace
}  // namespace detjax
