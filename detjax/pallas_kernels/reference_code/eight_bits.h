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
constexpr int kLanes8 = 16;      // outputs side by side
constexpr int kRows8 = 64;       // rows that read the weights of a step together

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

// A number of float8 (e4m3fn) as float32, and the power of two that its products are aligned by:
// 2^-6 of subnormal numbers, 0 of zeros. NaN is some number.
inline void widen_float8(int32_t byte, float& value, float& power) {
  const int32_t size = (byte & 0x7f) << 20, least = 121 << 23;  // 2^-6
  const bool is_subnormal = size < (1 << 23);
  float wide = float_of(size + (is_subnormal ? least : 120 << 23));
  wide -= is_subnormal ? 0x1p-6f : 0.0f;
  const int32_t exponent = std::max(int32_t(bits_of(wide)) & int32_t(kExponent), least);
  power = float_of(size ? exponent : 0);
  value = float_of(bits_of(wide) | (byte & 0x80) << 24);
}

inline bool has_nan8(const uint8_t* from, int64_t width) {
  int32_t nans = 0;
  for (int64_t k = 0; k < width; ++k) nans |= (from[k] & 0x7f) == 0x7f;
  return nans;
}

// Rows of float8, widened, with zeros behind them up to whole chunks: a step of zeros changes no
// sum.
struct Float8Rows {
  int64_t k_len;
  std::vector<float> values, powers;  // [M, k_len]
  std::vector<uint8_t> has_nan;       // [M]

  Float8Rows(int64_t rows, int64_t width)
      : k_len((width + kChunk8 - 1) / kChunk8 * kChunk8),
        values(rows * k_len), powers(rows * k_len), has_nan(rows) {}

  void set(int64_t row, const uint8_t* from, int64_t width) {
    float *value = values.data() + row * k_len, *power = powers.data() + row * k_len;
    for (int64_t k = 0; k < width; ++k) widen_float8(from[k], value[k], power[k]);
    has_nan[row] = has_nan8(from, width);
  }
};

typedef uint8_t Bytes __attribute__((vector_size(kLanes8)));

// Turn 16 rows of 16 bytes into columns.
inline void transpose_bytes(Bytes* rows) {
  Bytes other[kLanes8];
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < kLanes8 / 2; ++i) {
      const Bytes a = rows[i], b = rows[i + kLanes8 / 2];
      other[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22,
                                             7, 23);
      other[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29,
                                                 14, 30, 15, 31);
    }
    std::memcpy(rows, other, sizeof other);
  }
}

// The weights of a step for `kLanes8` outputs, widened.
struct Float8Step {
  float values[kStep8][kLanes8], powers[kStep8][kLanes8];

  // From `count` rows of `width` codes, at channel k.
  void set(const uint8_t* rows, int64_t count, int64_t width, int64_t k) {
    const int64_t steps = std::min<int64_t>(kStep8, width - k);
    for (int half = 0; half < kStep8; half += kLanes8) {
      Bytes bytes[kLanes8] = {};
      const int64_t some = std::clamp<int64_t>(steps - half, 0, kLanes8);
      for (int64_t lane = 0; lane < count; ++lane)
        std::memcpy(&bytes[lane], rows + lane * width + k + half, some);
      transpose_bytes(bytes);
      for (int t = 0; t < kLanes8; ++t)
        for (int lane = 0; lane < kLanes8; ++lane)
          widen_float8(bytes[t][lane], values[half + t][lane], powers[half + t][lane]);
    }
  }
};

// One step of `kLanes8` outputs: adds 32 products to each of `totals`. All products are exact.
inline void float8_step(float* totals, const float* x, const float* x_powers, const Float8Step& w) {
  int32_t tops[kLanes8], sums[kLanes8];
  float scales[kLanes8];
  for (int n = 0; n < kLanes8; ++n) tops[n] = int32_t(bits_of(totals[n])) & int32_t(kExponent);
  for (int t = 0; t < kStep8; ++t)
    for (int n = 0; n < kLanes8; ++n)
      tops[n] = std::max(tops[n], int32_t(bits_of(x_powers[t] * w.powers[t][n])));
  for (int n = 0; n < kLanes8; ++n) {
    scales[n] = float_of(((254 + kFraction8) << 23) - tops[n]);  // 2^13 over that of the largest
    sums[n] = int32_t(totals[n] * scales[n]);
  }
  for (int t = 0; t < kStep8; ++t)
    for (int n = 0; n < kLanes8; ++n) sums[n] += int32_t(x[t] * w.values[t][n] * scales[n]);
  for (int n = 0; n < kLanes8; ++n) {
    // Less than 2^24, and cut to its first bit and 13 more.
    float cut = float_of(bits_of(float(sums[n])) & ~((1u << (23 - kFraction8)) - 1));
    totals[n] = sums[n] ? cut * float_of(tops[n] - (kFraction8 << 23)) : 0.0f;
  }
}

// What a product adds up for `kLanes8` outputs and some rows.
struct Float8Sums {
  float chunks[kRows8][kLanes8], totals[kRows8][kLanes8];
};

// ((c_0 + c_1) + c_2) + ..., c_g the sum of a chunk from zero; with scales of groups
// total = fma(c_g, x_scales[g, m] * w_scales[n, g], total).
inline void float8_sums(const Float8Rows& x, const int32_t* rows, int64_t row_count,
                        const uint8_t* w, int64_t count, int64_t width, const float* x_scales,
                        int64_t stride, const float* const* w_scales, Float8Sums& sums) {
  Float8Step step;
  std::memset(sums.totals, 0, sizeof sums.totals);
  for (int64_t k = 0; k < x.k_len; k += kChunk8) {
    std::memset(sums.chunks, 0, sizeof sums.chunks);
    for (int64_t s = k; s < std::min(k + kChunk8, width); s += kStep8) {
      step.set(w, count, width, s);
      for (int64_t i = 0; i < row_count; ++i) {
        const int64_t at = rows[i] * x.k_len + s;
        float8_step(sums.chunks[i], &x.values[at], &x.powers[at], step);
      }
    }
    const int64_t g = k / kChunk8;
    for (int64_t i = 0; i < row_count; ++i)
      for (int64_t n = 0; n < count; ++n) {
        float &total = sums.totals[i][n], chunk = sums.chunks[i][n];
        total = w_scales == nullptr
                    ? total + chunk
                    : fma(chunk, x_scales[g * stride + rows[i]] * w_scales[n][g], total);
      }
  }
}

// out[s, n] = (sum_k(x[r, k] w[e, n, k]) * w_scales[e, n]) * x_scales[r] + bias[e, n], float32,
// where e = ids[s] and r = s / (S / R); zeros where there is no such expert. With x_scales [G, R]
// and w_scales [E, N / B, G] those of groups of channels are inside of the sum. bias may have no
// elements.
ffi::Error w8a8_product(ffi::ThreadPool pool, In x, In x_scales, In w, In w_scales, In bias, In ids,
                        Out out) {
  const int64_t r_len = dim(x, 0), k_len = dim(x, 1), n_len = dim(w, 1);
  const bool is_int = x.element_type() == ffi::DataType::S8;
  const bool has_groups = x_scales.dimensions().size() == 2, has_bias = bias.element_count();
  const int64_t scale_rows = dim(w_scales, 1), groups = has_groups ? k_len / kChunk8 : 1;
  const ExpertSlots slots(ids, r_len, dim(w, 0));
  for (int32_t s : slots.absent) std::fill_n(data<float>(out) + s * n_len, n_len, 0.0f);
  Float8Rows rows(is_int ? 0 : r_len, k_len);
  if (!is_int)
    parallel(pool, r_len, [&](int64_t m) { rows.set(m, data<uint8_t>(x) + m * k_len, k_len); });
  const int64_t pieces = (n_len + kLanes8 - 1) / kLanes8;
  parallel(pool, int64_t(slots.present.size()) * pieces, [&](int64_t job) {
    const SlotsOfExpert& group = slots.present[job / pieces];
    const int64_t first = job % pieces * kLanes8, count = std::min<int64_t>(kLanes8, n_len - first);
    const int64_t own = (group.expert * n_len + first) * k_len;
    const float* scales[kLanes8];
    for (int64_t n = 0; n < count; ++n)
      scales[n] = data<float>(w_scales) +
                  (group.expert * scale_rows + (first + n) / (n_len / scale_rows)) * groups;
    auto write = [&](int64_t i, int64_t n, float total) {
      if (!has_groups) total = (total * scales[n][0]) * data<float>(x_scales)[group.rows[i]];
      if (has_bias) total = total + read(bias, group.expert * n_len + first + n);
      data<float>(out)[group.slots[i] * n_len + first + n] = total;
    };
    const int64_t slot_count = group.slots.size();
    if (is_int) {
      for (int64_t n = 0; n < count; ++n)
        for (int64_t i = 0; i < slot_count; ++i) {
          const int8_t *a = data<int8_t>(x) + group.rows[i] * k_len;
          const int8_t *b = data<int8_t>(w) + own + n * k_len;
          int32_t sum = 0;
          for (int64_t k = 0; k < k_len; ++k) sum += int16_t(a[k]) * int16_t(b[k]);
          write(i, n, float(sum));
        }
      return;
    }
    const uint8_t* codes = data<uint8_t>(w) + own;
    bool is_nan[kLanes8];
    for (int64_t n = 0; n < count; ++n) is_nan[n] = has_nan8(codes + n * k_len, k_len);
    Float8Sums sums;
    for (int64_t i = 0; i < slot_count; i += kRows8) {
      const int64_t some = std::min<int64_t>(kRows8, slot_count - i);
      float8_sums(rows, &group.rows[i], some, codes, count, k_len, data<float>(x_scales), r_len,
                  has_groups ? scales : nullptr, sums);
      for (int64_t m = 0; m < some; ++m)
        for (int64_t n = 0; n < count; ++n) {
          const bool has_nan = is_nan[n] || rows.has_nan[group.rows[i + m]];
          write(i + m, n, has_nan ? float_of(0x7fffffffu) : sums.totals[m][n]);
        }
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace detjax
