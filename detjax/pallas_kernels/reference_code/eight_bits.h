// SPDX-License-Identifier: Apache-2.0
// Products of 8-bit activations and weights: int8, whose sums are exact, and float8 (e4m3fn).
//
// A step of wgmma in float8 adds 32 products to the accumulator. All are aligned to the largest
// exponent, cut at 13 fraction bits and added exactly; the sum is cut to 13 bits below its first.
#pragma once

#include "experts.h"

namespace detjax {
namespace {

constexpr int kStep8 = 32;       // products of a step
constexpr int kFraction8 = 13;   // fraction bits that are kept below the largest exponent
constexpr int kChunk8 = 128;     // channels of an accumulator; chunks are added in float32
constexpr int kPoint8 = 6;       // fraction bits of a product of two significands
constexpr int kNothing = -1000;  // exponent of a zero

// cvt.rn.satfinite.e4m3x2.f32: to nearest, ties to even, at most 448.
inline uint8_t round_float8(float x) {
  uint32_t u = bits_of(x), sign = u >> 24 & 0x80, size = u & 0x7fffffffu;
  if (size > 0x7f800000u) return 0x7f;
  if (size < (121u << 23))  // under 2^-6: a multiple of 2^-9
    return uint8_t(sign | uint32_t(std::nearbyint(std::fabs(x) * 512.0f)));
  uint32_t rounded = (size + 0x7ffffu + ((size >> 20) & 1)) >> 20;
  return uint8_t(sign | std::min<uint32_t>(rounded - (120u << 3), 0x7e));
}

// cvt.rni.s32.f32, then cvt.pack.sat.s8: to nearest, ties to even, saturated; NaN is 0.
inline int8_t round_int8(float x) {
  if (x != x) return 0;
  return int8_t(std::nearbyint(std::min(std::max(x, -128.0f), 127.0f)));
}

// Rows [M, K] of bfloat16 as 8-bit values and scales: [M], or [G, M] of groups of channels. A peak
// counts as `bound` at most; 0 is no bound. `given` is the scale of all rows, or has no elements.
ffi::Error quantize_rows(ffi::ThreadPool pool, In x, In given, Out values, Out scales,
                         float largest, float bound, int64_t group_len) {
  const int64_t m_len = dim(x, 0), width = dim(x, 1), size = group_len ? group_len : width;
  const bool is_int = values->element_type() == ffi::DataType::S8;
  const bool has_scale = given.element_count();
  parallel(pool, m_len, [&](int64_t m) {
    for (int64_t g = 0; g < width / size; ++g) {
      const int64_t first = m * width + g * size;
      const uint16_t* row = data<uint16_t>(x) + first;
      float scale, inverse;
      if (has_scale) {
        scale = data<float>(given)[0], inverse = 1.0f / scale;
      } else {
        float peak = 0.0f;
        for (int64_t k = 0; k < size; ++k) peak = max_nan(peak, std::fabs(widen(row[k])));
        if (bound > 0.0f) peak = min_nan(peak, bound);
        const float quotient = largest / peak;
        scale = peak / largest;
        inverse = std::isinf(quotient) ? 0.0f : quotient;  // zero times infinity is NaN
      }
      data<float>(scales)[g * m_len + m] = scale;
      for (int64_t k = 0; k < size; ++k) {
        float scaled = widen(row[k]) * inverse;
        if (is_int)
          data<int8_t>(values)[first + k] = round_int8(scaled);
        else
          data<uint8_t>(values)[first + k] = round_float8(scaled);
      }
    }
  });
  return ffi::Error::Success();
}

// Rows of float8, unpacked, with zeros behind them up to whole chunks: a step of zeros
// changes no sum.
struct Float8Rows {
  int64_t width, k_len;
  std::vector<int32_t> significands, exponents;  // [M, k_len]: value = significand * 2^(exponent - 3)
  std::vector<uint8_t> has_nan;                  // [M]

  Float8Rows(int64_t rows, int64_t width)
      : width(width), k_len((width + kChunk8 - 1) / kChunk8 * kChunk8),
        significands(rows * k_len), exponents(rows * k_len), has_nan(rows) {}

  void set(int64_t row, const uint8_t* from) {
    for (int64_t k = 0; k < width; ++k) {
      int e = from[k] >> 3 & 15, s = (from[k] & 7) | (e ? 8 : 0);
      significands[row * k_len + k] = from[k] & 0x80 ? -s : s;
      exponents[row * k_len + k] = e ? e - 7 : -6;
      has_nan[row] |= (from[k] & 0x7f) == 0x7f;
    }
  }
};

// One step of one output: adds 32 products to `total`.
inline float float8_step(float total, const int32_t* x, const int32_t* x_exponents,
                         const int32_t* w, const int32_t* w_exponents) {
  int32_t products[kStep8], exponents[kStep8], top = kNothing;
  for (int t = 0; t < kStep8; ++t) {
    products[t] = x[t] * w[t];
    exponents[t] = products[t] ? x_exponents[t] + w_exponents[t] : kNothing;
    top = std::max(top, exponents[t]);
  }
  Term kept = term_of(total, 23);
  if (kept.significand) top = std::max(top, kept.exponent);
  if (top == kNothing) return 0.0f;
  int32_t sum = 0;
  for (int t = 0; t < kStep8; ++t) {
    int32_t sign = products[t] >> 31, shift = std::min(top - exponents[t], 31);
    int32_t size = ((products[t] ^ sign) - sign) << (kFraction8 - kPoint8) >> shift;
    sum += (size ^ sign) - sign;
  }
  int64_t size = kept.significand < 0 ? -kept.significand : kept.significand;
  size >>= std::min(top - kept.exponent + 23 - kFraction8, 62);
  sum += int32_t(kept.significand < 0 ? -size : size);
  if (!sum) return 0.0f;
  uint32_t added = sum < 0 ? -sum : sum;
  int spare = std::max(31 - __builtin_clz(added) - kFraction8, 0);
  float result = std::ldexp(float(added >> spare << spare), top - kFraction8);
  return sum < 0 ? -result : result;
}

// The sum of a chunk of 128 channels, from zero.
inline float float8_chunk(const Float8Rows& x, int64_t m, const Float8Rows& w, int64_t n, int64_t k) {
  float chunk = 0.0f;
  for (int64_t s = k; s < k + kChunk8; s += kStep8) {
    int64_t at = m * x.k_len + s, own = n * w.k_len + s;
    chunk = float8_step(chunk, &x.significands[at], &x.exponents[at], &w.significands[own],
                        &w.exponents[own]);
  }
  return chunk;
}

// ((c_0 + c_1) + c_2) + ..., c_i the sum of a chunk.
inline float float8_sum(const Float8Rows& x, int64_t m, const Float8Rows& w, int64_t n) {
  float total = 0.0f;
  for (int64_t k = 0; k < x.k_len; k += kChunk8) total = total + float8_chunk(x, m, w, n, k);
  return total;
}

// total = fma(c_g, x_scales[g] * w_scales[g], total) from 0; `stride` is between scales of x.
inline float float8_scaled_sum(const Float8Rows& x, int64_t m, const Float8Rows& w, int64_t n,
                               const float* x_scales, int64_t stride, const float* w_scales) {
  float total = 0.0f;
  for (int64_t g = 0; g < x.k_len / kChunk8; ++g)
    total = fma(float8_chunk(x, m, w, n, g * kChunk8), x_scales[g * stride] * w_scales[g], total);
  return total;
}

// out[s, n] = (sum_k(x[r, k] w[e, n, k]) * w_scales[e, n]) * x_scales[r] + bias[e, n], float32, where
// e = ids[s] and r = s / (S / R); zeros where there is no such expert. With x_scales [G, R] and
// w_scales [E, N / B, G] those of groups of channels are inside of the sum. bias may have no elements.
ffi::Error w8a8_product(ffi::ThreadPool pool, In x, In x_scales, In w, In w_scales, In bias, In ids,
                        Out out) {
  const int64_t r_len = dim(x, 0), k_len = dim(x, 1), n_len = dim(w, 1), piece = 16;
  const bool is_int = x.element_type() == ffi::DataType::S8;
  const bool has_groups = x_scales.dimensions().size() == 2, has_bias = bias.element_count();
  const int64_t scale_rows = dim(w_scales, 1), groups = has_groups ? k_len / kChunk8 : 1;
  const ExpertSlots slots(ids, r_len, dim(w, 0));
  for (int32_t s : slots.absent) std::fill_n(data<float>(out) + s * n_len, n_len, 0.0f);
  Float8Rows rows(is_int ? 0 : r_len, k_len);
  if (!is_int)
    parallel(pool, r_len, [&](int64_t m) { rows.set(m, data<uint8_t>(x) + m * k_len); });
  const int64_t pieces = (n_len + piece - 1) / piece;
  parallel(pool, int64_t(slots.present.size()) * pieces, [&](int64_t job) {
    const SlotsOfExpert& group = slots.present[job / pieces];
    const int64_t first = job % pieces * piece;
    Float8Rows weights(is_int ? 0 : 1, k_len);
    for (int64_t n = first; n < std::min(n_len, first + piece); ++n) {
      const int64_t own = (group.expert * n_len + n) * k_len;
      if (!is_int) weights.has_nan[0] = 0, weights.set(0, data<uint8_t>(w) + own);
      const float* of_n = data<float>(w_scales) +
                          (group.expert * scale_rows + n / (n_len / scale_rows)) * groups;
      for (size_t i = 0; i < group.slots.size(); ++i) {
        const int64_t m = group.rows[i];
        float total;
        if (is_int) {
          const int8_t *a = data<int8_t>(x) + m * k_len, *b = data<int8_t>(w) + own;
          int32_t sum = 0;
          for (int64_t k = 0; k < k_len; ++k) sum += int16_t(a[k]) * int16_t(b[k]);
          total = float(sum);
        } else if (rows.has_nan[m] || weights.has_nan[0]) {
          total = float_of(0x7fffffffu);
        } else if (has_groups) {
          total = float8_scaled_sum(rows, m, weights, 0, data<float>(x_scales) + m, r_len, of_n);
        } else {
          total = float8_sum(rows, m, weights, 0);
        }
        if (!has_groups) total = (total * of_n[0]) * data<float>(x_scales)[m];
        if (has_bias) total = total + read(bias, group.expert * n_len + n);
        data<float>(out)[group.slots[i] * n_len + n] = total;
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace detjax
