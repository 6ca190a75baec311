// SPDX-License-Identifier: Apache-2.0
// What wgmma of bfloat16 adds, to the bit: 16 products a step on a float32 accumulator.
//
// A step aligns the products and the accumulator to the largest exponent, cuts each at 25 fraction
// bits, adds exactly, and rounds the sum toward zero to float32. `exact_step` is that definition on
// integers. `add_steps` computes it for many outputs at once, by float operations that lose nothing,
// and says where its operands are outside of the range in which that is true.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "float32.h"

namespace detjax {

constexpr int kStep = 16;           // products of a step
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
  std::vector<int32_t> exponents;   // [M, K]: bits of the exponent, less that of 1.0
  std::vector<uint8_t> steps_zero;  // [M, K / 16]: nothing is added
  std::vector<uint8_t> is_large;    // [M]

  void resize(int rows, int width) {
    count = rows, k_len = width;
    values.resize(size_t(rows) * width), exponents.resize(size_t(rows) * width);
    steps_zero.resize(size_t(rows) * (width / kStep)), is_large.resize(rows);
  }

  void set(int row, const uint16_t* bf16) {
    float* v = &values[size_t(row) * k_len];
    int32_t* e = &exponents[size_t(row) * k_len];
    uint16_t largest = 0;
    for (int k = 0; k < k_len; ++k) {
      uint32_t u = uint32_t(bf16[k]) << 16;
      largest = std::max(largest, uint16_t(bf16[k] & 0x7fff));
      v[k] = float_of(u);
      e[k] = int32_t(u & kExponent) - (127 << 23);
    }
    is_large[row] = largest >= kLargeBf16;
    for (int s = 0; s < k_len / kStep; ++s) {
      uint16_t any = 0;
      for (int t = 0; t < kStep; ++t) any |= bf16[s * kStep + t] & 0x7fff;
      steps_zero[size_t(row) * (k_len / kStep) + s] = !any;
    }
  }
};

template <int W>
struct Lanes {
  typedef float F __attribute__((vector_size(4 * W)));
  typedef int32_t I __attribute__((vector_size(4 * W)));
};

template <class V>
DETJAX_INLINE V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// Add steps of K to W outputs. False if a step was out of range, and the result is not to be used.
template <int W>
DETJAX_INLINE bool add_steps(const float* w, const float* x, const int32_t* x_exponents,
                             const uint8_t* steps_zero, int steps, float* accumulators) {
  using F = typename Lanes<W>::F;
  using I = typename Lanes<W>::I;
  const I exponent_mask = I{} + int32_t(kExponent), sign = I{} + INT32_MIN;
  const int32_t lowest = (127 - 100) << 23, highest = (127 + 90) << 23;
  F total = load<F>(accumulators);
  I odd{};
  for (int s = 0; s < steps; ++s) {
    if (steps_zero[s]) continue;
    const float *ws = w + s * kStep * W, *xs = x + s * kStep;
    const int32_t* es = x_exponents + s * kStep;
    F weights[kStep];
    I top = (I)total & exponent_mask;
    for (int t = 0; t < kStep; ++t) {
      weights[t] = load<F>(ws + t * W);
      I e = ((I)weights[t] & exponent_mask) + es[t];
      top = e > top ? e : top;
    }
    odd |= (top < lowest) | (top > highest);
    F scale = (F)(((254 + kFraction) << 23) - top);
    I first = __builtin_convertvector(total * scale, I), second{};
    for (int t = 0; t < kStep; t += 2) {  // each half has less than 2^31
      first += __builtin_convertvector(weights[t] * xs[t] * scale, I);
      second += __builtin_convertvector(weights[t + 1] * xs[t + 1] * scale, I);
    }
    I sum = first + second;
    odd |= (first ^ sum) & (second ^ sum);  // negative if the sum overflowed
    I negative = sum >> 31;
    I size = (sum ^ negative) - negative;
    // Without the first bit that does not fit 24, the conversion rounds toward zero.
    size &= ~(size >> 24);
    F value = __builtin_convertvector(size, F) * (F)(top - (kFraction << 23));
    total = (F)((I)value | (negative & sign));
  }
  std::memcpy(accumulators, &total, sizeof total);
  int32_t lanes[W], any = 0;
  std::memcpy(lanes, &odd, sizeof odd);
  for (int i = 0; i < W; ++i) any |= lanes[i];
  return any >= 0;
}

template <int W, int S, bool SECOND, int... N>
DETJAX_INLINE typename Lanes<W>::I mixed(typename Lanes<W>::I a, typename Lanes<W>::I b,
                                         std::integer_sequence<int, N...>) {
  if constexpr (SECOND) return __builtin_shufflevector(a, b, ((N & S) ? N + W : N + S)...);
  return __builtin_shufflevector(a, b, ((N & S) ? N - S + W : N)...);
}

template <int W, int S>
DETJAX_INLINE void transpose(typename Lanes<W>::I* rows) {
  if constexpr (S < W) {
    auto indices = std::make_integer_sequence<int, W>();
    for (int i = 0; i < W; ++i) {
      if (i & S) continue;
      auto a = rows[i], b = rows[i + S];
      rows[i] = mixed<W, S, false>(a, b, indices);
      rows[i + S] = mixed<W, S, true>(a, b, indices);
    }
    transpose<W, 2 * S>(rows);
  }
}

// Where weights of W outputs lie: outputs by rows of K (a layer's), or K by rows of outputs (values).
struct Weights {
  const uint16_t* data;
  ptrdiff_t stride;  // between rows
  int outputs;       // that there are, of W
  bool outputs_in_rows;
};

// Unpack `count` of K as [count, W] float32; whether one is too large for add_steps.
template <int W>
DETJAX_INLINE bool unpack(const Weights& w, int first, int count, float* out) {
  using I = typename Lanes<W>::I;
  I large{};
  const I add = I{} + int32_t(0x10001 * (0x8000 - kLargeBf16));
  const I sizes = I{} + 0x7fff7fff, high = I{} + int32_t(0xffff0000);
  if (!w.outputs_in_rows) {
    bool is_large = false;
    for (int k = 0; k < count; ++k) {
      const uint16_t* row = w.data + (first + k) * w.stride;
      for (int o = 0; o < W; ++o) {
        uint16_t v = o < w.outputs ? row[o] : 0;
        is_large |= (v & 0x7fff) >= kLargeBf16;
        out[k * W + o] = widen(v);
      }
    }
    return is_large;
  }
  for (int k = 0; k < count; k += 2 * W) {
    int here = std::min(2 * W, count - k);
    I rows[W];
    for (int o = 0; o < W; ++o) {
      rows[o] = I{};
      const uint16_t* row = w.data + o * w.stride + first + k;
      if (o < w.outputs) std::memcpy(&rows[o], row, here == 2 * W ? 4 * W : 2 * here);
    }
    transpose<W, 1>(rows);
    for (int p = 0; p < here / 2; ++p) {  // a pair of K
      large |= (rows[p] & sizes) + add;
      I pair[2] = {rows[p] << 16, rows[p] & high};
      std::memcpy(out + (k + 2 * p) * W, pair, sizeof pair);
    }
  }
  int32_t lanes[W], any = 0;
  std::memcpy(lanes, &large, sizeof large);
  for (int i = 0; i < W; ++i) any |= lanes[i];
  return any & 0x80008000;
}

// Products of all rows with W outputs, over `count` of K from `first`, added to `accumulators`.
struct Tile {
  const Rows* rows;
  int first_row, num_rows;
  Weights weights;
  int first, count;     // of K, in the weights
  int first_of_rows;    // of K, in the rows
  float* accumulators;  // [num_rows, W]
};

template <int W>
DETJAX_INLINE void run_tile(const Tile& tile) {
  alignas(64) float unpacked[kChunk * W];
  const Rows& rows = *tile.rows;
  for (int k = 0; k < tile.count; k += kChunk) {
    int here = std::min(kChunk, tile.count - k);
    bool is_large = unpack<W>(tile.weights, tile.first + k, here, unpacked);
    for (int m = 0; m < tile.num_rows; ++m) {
      size_t row = tile.first_row + m, at = row * rows.k_len + tile.first_of_rows + k;
      float* accumulators = tile.accumulators + m * W;
      float before[W];
      std::memcpy(before, accumulators, sizeof before);
      if (!is_large && !rows.is_large[row] &&
          add_steps<W>(unpacked, &rows.values[at], &rows.exponents[at],
                       &rows.steps_zero[at / kStep], here / kStep, accumulators))
        continue;
      for (int o = 0; o < tile.weights.outputs; ++o) {
        for (int s = 0; s < here; s += kStep)
          before[o] = exact_step(before[o], &rows.values[at + s], unpacked + s * W + o, W);
        accumulators[o] = before[o];
      }
    }
  }
}

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))) inline void run_tile_16(
    const Tile& tile) {
  run_tile<16>(tile);
}
__attribute__((target("avx2,fma"))) inline void run_tile_8(const Tile& tile) { run_tile<8>(tile); }
#endif
inline void run_tile_4(const Tile& tile) { run_tile<4>(tile); }

// The widest vectors of this processor.
struct Processor {
  int lanes;
  void (*run)(const Tile&);
};

inline Processor processor_of(int most_lanes) {
#if defined(__x86_64__)
  if (most_lanes >= 16 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return {16, run_tile_16};
  if (most_lanes >= 8 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return {8, run_tile_8};
#endif
  return {4, run_tile_4};
}

inline Processor processor = processor_of(16);

}  // namespace detjax
