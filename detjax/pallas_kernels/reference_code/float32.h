// SPDX-License-Identifier: Apache-2.0
// Float32 operations of a Hopper GPU, to the bit. Every function names what it stands for in PTX.
//
// Compile with -ffp-contract=off: a product and a sum are fused only where fma is written. The tables
// of ex2, rcp and rsqrt come from a GPU (set_tables); all else is IEEE arithmetic.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace detjax {

#define DETJAX_INLINE inline __attribute__((always_inline))

DETJAX_INLINE uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

DETJAX_INLINE float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

DETJAX_INLINE float widen(uint16_t bf16) { return float_of(uint32_t(bf16) << 16); }

// cvt.rn.bf16.f32: to nearest, ties to even.
DETJAX_INLINE uint16_t round_bf16(float x) {
  uint32_t u = bits_of(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

DETJAX_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// max.NaN.f32
DETJAX_INLINE float max_nan(float a, float b) {
  if (a != a || b != b) return float_of(0x7fffffffu);
  return a > b ? a : b;
}

// min.NaN.f32
DETJAX_INLINE float min_nan(float a, float b) {
  if (a != a || b != b) return float_of(0x7fffffffu);
  return a < b ? a : b;
}

constexpr float kInfinity = __builtin_huge_valf();
constexpr uint32_t kOctave = 1u << 23;

// Bits of ex2 on [0, 1), of 1/x on [1, 2) and of 1/sqrt(x) on [1, 4), by the input's significand.
struct Tables {
  const uint32_t* ex2;
  const uint32_t* rcp;
  const uint32_t* rsqrt;
};
inline Tables tables;

// ex2.approx.ftz.f32. The size of x is cut to a multiple of 2^-23. What is negative and no whole
// number becomes its one's complement: one unit below the number that it is.
DETJAX_INLINE float ex2(float x) {
  if (x != x) return float_of(0x7fffffffu);
  if (x >= 128.0f) return kInfinity;
  if (x < -126.0f) return 0.0f;
  int32_t fixed = int32_t(std::fabs(x) * 8388608.0f);
  if (x < 0.0f) fixed = fixed & (kOctave - 1) ? ~fixed : -fixed;
  uint32_t found = tables.ex2[uint32_t(fixed) & (kOctave - 1)];
  return float_of(found + uint32_t(fixed >> 23) * kOctave);
}

// rcp.approx.f32 of 2^-126 to 2^126, or infinity.
DETJAX_INLINE float rcp(float x) {
  uint32_t u = bits_of(x), sign = u & 0x80000000u;
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return float_of(0x7fffffffu);
  if (u == 0x7f800000u) return float_of(sign);
  return float_of((tables.rcp[u & (kOctave - 1)] - ((u >> 23) - 127) * kOctave) | sign);
}

// rsqrt.approx.f32 of normal numbers above zero.
DETJAX_INLINE float rsqrt(float x) {
  uint32_t u = bits_of(x);
  if (u > 0x7f800000u) return float_of(0x7fffffffu);
  if (u == 0x7f800000u) return 0.0f;
  int32_t exponent = int32_t(u >> 23) - 127;
  uint32_t found = tables.rsqrt[uint32_t(exponent & 1) * kOctave + (u & (kOctave - 1))];
  return float_of(found - uint32_t(exponent >> 1) * kOctave);
}

// div.full.f32
DETJAX_INLINE float div_full(float a, float b) {
  float size = std::fabs(b);
  if (size > 8.50705917302346158658e+37f) a *= 0.25f, b *= 0.25f;
  if (size < 1.175494350822287508e-38f) a *= 16777216.0f, b *= 16777216.0f;
  return rcp(b) * a;
}

// cap * tanh(y), exponent x = 2 log2(e) y. Beyond 2^120 the reciprocal leaves the cap as it is.
DETJAX_INLINE float soft_cap(float x, float exponent, float cap) {
  float power = ex2(x * exponent);
  float share = power > 1.329227995784915873e36f ? 0.0f : rcp(power + 1.0f);
  return fma(share, -2.0f * cap, cap);
}

// libdevice's expf.
DETJAX_INLINE float exp(float x) {
  float t = fma(x, float_of(0x3bbb989du), 0.5f);
  t = t > 0.0f ? (t < 1.0f ? t : 1.0f) : 0.0f;
  float shifted = 12582913.0f + float(std::floor(double(t) * 252.0));  // fma.rm
  float n = shifted - 12583039.0f;
  float r = fma(x, float_of(0x3fb8aa3bu), -n);
  r = fma(x, float_of(0x32a57060u), r);
  return ex2(r) * float_of(bits_of(shifted) << 23);
}

// libdevice's logf.
DETJAX_INLINE float log(float x) {
  bool is_small = x < 1.175494350822287508e-38f;
  if (is_small) x *= 8388608.0f;
  uint32_t u = bits_of(x);
  uint32_t e = (u - 0x3f2aaaabu) & 0xff800000u;
  float f = fma(float(int32_t(e)), float_of(0x34000000u), is_small ? -23.0f : 0.0f);
  float r = float_of(u - e) - 1.0f;
  const uint32_t terms[] = {0xbe055027u, 0x3e1039f6u, 0xbdf8cdccu, 0x3e0f2955u, 0xbe2ad8b9u,
                            0x3e4ced0bu, 0xbe7fff22u, 0x3eaaaa78u, 0xbf000000u};
  float p = float_of(terms[0]);
  for (int i = 1; i < 9; ++i) p = fma(p, r, float_of(terms[i]));
  p = fma(r * p, r, r);
  p = fma(f, float_of(0x3f317218u), p);
  if (u > 0x7f7fffffu) p = fma(x, kInfinity, kInfinity);
  return x == 0.0f ? -kInfinity : p;
}

// libdevice's log1pf of -1 < x < 0.
DETJAX_INLINE float log1p(float x) {
  float s = x + 1.0f;
  float part = s - 1.0f;
  float lost = (1.0f - (s - part)) + (x - part);
  if (lost < 0.0f) s = float_of(bits_of(s) - 1);  // add.rz
  uint32_t e = (bits_of(s) - 0x3f400000u) & 0xff800000u;
  float r = fma(float_of(0x40800000u - e), 0.25f, -1.0f) + float_of(bits_of(x) - e);
  float f = float(int32_t(e)) * float_of(0x34000000u);
  const uint32_t terms[] = {0xbd39bf78u, 0x3dd80012u, 0xbe0778e0u, 0x3e146475u, 0xbe2a68ddu,
                            0x3e4caf9eu, 0xbe800042u, 0x3eaaaae6u, 0xbf000000u};
  float p = float_of(terms[0]);
  for (int i = 1; i < 9; ++i) p = fma(p, r, float_of(terms[i]));
  p = fma(r * p, r, r);
  return fma(f, float_of(0x3f317218u), p);
}

DETJAX_INLINE float sigmoid_times(float factor, float x) { return div_full(factor, exp(-x) + 1.0f); }

}  // namespace detjax
