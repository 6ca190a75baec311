// SPDX-License-Identifier: Apache-2.0
// What wgmma of bfloat16 adds, to the bit: 16 products a step on a float32 accumulator.
//
// A step aligns the products and the accumulator to the largest exponent, cuts each at 25 fraction
// bits, adds exactly, and rounds the sum toward zero to float32. `exact_step` is that definition on
// integers. `add_steps` computes it for many outputs at once, by float operations that lose nothing,
// and says where its operands are outside of the range in which that is true.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "float32.h"

namespace detjax {

constexpr int kStep = 16;           // products of a step
constexpr int kStepPairs = kStep / 2;
constexpr int kFraction = 25;       // fraction bits that are kept below the largest exponent
constexpr int kChunk = 256;         // of K, whose weights are unpacked at once
constexpr uint32_t kExponent = 0x7f800000u;
constexpr uint16_t kLargeBf16 = (127 + 24) << 7;  // 2^24, from which on add_steps takes no operand

struct Term {
  int64_t significand;  // with its sign; the value is significand * 2^(exponent - point)
  int exponent;
};

DETJAX_INLINE Term term_of(float x, int fraction_bits) {
  uint32_t u = bits_of(x);
  int e = (u >> 23) & 255;
  int64_t s = (u & 0x7fffffu) | (e ? 0x800000u : 0u);
  s >>= 23 - fraction_bits;
  return {u >> 31 ? -s : s, e ? e - 127 : -126};
}

// One step of one output; `stride` is between neighbouring k of w.
inline float exact_step(float accumulator, const float* x, const float* w, int stride) {
  Term terms[kStep + 1];
  int top = INT32_MIN;
  float special = 0.0f;  // infinities add up to one, or to NaN
  bool is_special = false;
  for (int t = 0; t <= kStep; ++t) {
    int point;
    if (t < kStep) {
      float a = x[t], b = w[t * stride];
      if (!std::isfinite(a) || !std::isfinite(b)) is_special = true, special += a * b;
      Term s = term_of(a, 7), r = term_of(b, 7);
      terms[t] = {s.significand * r.significand, s.exponent + r.exponent};
      point = 14;
    } else {
      if (!std::isfinite(accumulator)) is_special = true, special += accumulator;
      terms[t] = term_of(accumulator, 23);
      point = 23;
    }
    if (terms[t].significand) top = std::max(top, terms[t].exponent);
    terms[t].significand *= int64_t(1) << (kFraction - point);
  }
  if (is_special) return special != special ? float_of(0x7fffffffu) : special;
  int64_t sum = 0;
  for (const Term& term : terms) {
    int64_t size = term.significand < 0 ? -term.significand : term.significand;
    if (!size) continue;
    size = top - term.exponent < 62 ? size >> (top - term.exponent) : 0;
    sum += term.significand < 0 ? -size : size;
  }
  if (!sum) return 0.0f;
  uint64_t size = sum < 0 ? -sum : sum;
  int unit = top - kFraction;                          // size * 2^unit is the sum
  int leading = unit + 63 - __builtin_clzll(size);     // exponent of the leading bit
  int last = std::max(leading - 23, -149);
  size = last >= unit ? size >> (last - unit) : size << (unit - last);
  float result = leading > 127 ? kInfinity : float(std::ldexp(double(size), last));
  return sum < 0 ? -result : result;
}

// Rows of activations as the steps read them.
struct Rows {
  int count = 0, k_len = 0;
  std::vector<float> values;        // [M, K]
  std::vector<int32_t> exponents;   // [M, K / 2], of pairs: bits of bfloat16, less those of 1.0
  std::vector<uint8_t> steps_zero;  // [M, K / 16]: nothing is added
  std::vector<uint8_t> is_large;    // [M]

  void resize(int rows, int width) {
    count = rows, k_len = width;
    values.resize(size_t(rows) * width), exponents.resize(size_t(rows) * width / 2);
    steps_zero.resize(size_t(rows) * (width / kStep)), is_large.resize(rows);
  }

  void set(int row, const uint16_t* bf16) {
    float* v = &values[size_t(row) * k_len];
    int32_t* e = &exponents[size_t(row) * k_len / 2];
    uint16_t largest = 0;
    for (int k = 0; k < k_len; ++k) {
      uint32_t u = uint32_t(bf16[k]) << 16;
      largest = std::max(largest, uint16_t(bf16[k] & 0x7fff));
      v[k] = float_of(u);
    }
    for (int p = 0; p < k_len / 2; ++p) {
      uint16_t first = (bf16[2 * p] & 0x7f80) - (127 << 7);
      uint16_t second = (bf16[2 * p + 1] & 0x7f80) - (127 << 7);
      e[p] = int32_t(first | uint32_t(second) << 16);
    }
    is_large[row] = largest >= kLargeBf16;
    for (int s = 0; s < k_len / kStep; ++s) {
      uint16_t any = 0;
      for (int t = 0; t < kStep; ++t) any |= bf16[s * kStep + t] & 0x7fff;
      steps_zero[size_t(row) * (k_len / kStep) + s] = !any;
    }
  }
};

// Where weights of W outputs lie: outputs by rows of K (a layer's), or K by rows of outputs (values).
struct Weights {
  const uint16_t* data;
  std::ptrdiff_t stride;  // between rows
  int outputs;       // that there are, of W
  bool outputs_in_rows;
};

// Products of all rows with W outputs, over `count` of K from `first`, added to `accumulators`.
struct Tile {
  const Rows* rows;
  int first_row, num_rows;
  Weights weights;
  int first, count;     // of K, in the weights
  int first_of_rows;    // of K, in the rows
  float* accumulators;  // [num_rows, W]
  const int32_t* row_ids = nullptr;  // [num_rows], in place of neighbours from first_row
  bool* has_large = nullptr;         // becomes true if a weight is 2^24, infinite or NaN
};

// The widest vectors of this processor.
struct Processor {
  int lanes;
  void (*run)(const Tile&);
};
extern Processor processor;

}  // namespace detjax
