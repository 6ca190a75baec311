// SPDX-License-Identifier: Apache-2.0
// Hashes of what the headers of the reference kernels compute, without XLA: the same on every machine.
// The tables of ex2, rcp and rsqrt are polynomials here, as only the arithmetic around them is probed.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#ifdef DETJAX_EVERY_WIDTH  // of vectors, by whatever instructions there are
#undef __x86_64__
#endif
#include "float32.h"
#include "tensor_core.cc"
#ifdef DETJAX_EVERY_WIDTH
#define DETJAX_LANES 8
#include "lanes.h"
#define DETJAX_LANES 16
#include "lanes.h"
#endif

namespace {

uint64_t state = 1;
uint32_t draw() {  // a linear congruential generator, upper bits
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return uint32_t(state >> 32);
}

// A bfloat16 with an exponent within `spread` of 1.0; some are zero and some are subnormal.
uint16_t draw_bf16(uint32_t spread) {
  uint32_t kind = draw() % 64;
  if (kind == 0) return uint16_t(draw() & 0x8000);
  if (kind == 1) return uint16_t(draw() & 0x807f);
  return uint16_t((draw() & 0x807f) | (127 - spread / 2 + draw() % spread) << 7);
}

struct Hash {
  uint64_t value = 14695981039346656037ull;
  void add(float x) {
    uint32_t u = detjax::bits_of(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) u = 0x7fffffffu;
    for (int i = 0; i < 4; ++i) value = (value ^ (u >> 8 * i & 255)) * 1099511628211ull;
  }
};

detjax::Processor processor_for(int lanes) {
#ifdef DETJAX_EVERY_WIDTH
  if (lanes == 8) return {8, detjax::lanes8::run_tile};
  if (lanes == 16) return {16, detjax::lanes16::run_tile};
#endif
  return detjax::processor_of(lanes);
}

// 16 rows of 512 by the vectors of this machine, and by the definition on integers.
int compare_products(uint32_t spread, int lanes, Hash& hash) {
  using namespace detjax;
  const int rows = 16, k_len = 512, outputs = 16;
  state = spread;
  std::vector<uint16_t> x(rows * k_len), w(outputs * k_len);
  for (auto& v : x) v = draw_bf16(spread);
  for (auto& v : w) v = draw_bf16(spread);
  Rows held;
  held.resize(rows, k_len);
  for (int m = 0; m < rows; ++m) held.set(m, &x[m * k_len]);
  Processor by = processor_for(lanes);
  int different = 0;
  std::vector<float> found(rows * outputs);
  for (int n = 0; n < outputs; n += by.lanes) {
    std::vector<float> sums(rows * by.lanes, 0.0f);
    const Weights own_weights{&w[n * k_len], k_len, by.lanes, true};
    by.run({&held, 0, rows, own_weights, 0, k_len, 0, sums.data()});
    for (int m = 0; m < rows; ++m) {  // a row alone is added while its weights are read
      std::vector<float> alone(by.lanes, 0.0f);
      by.run({&held, m, 1, own_weights, 0, k_len, 0, alone.data()});
      different += std::memcmp(alone.data(), &sums[m * by.lanes], 4 * by.lanes) != 0;
    }
    for (int m = 0; m < rows; ++m)
      for (int o = 0; o < by.lanes; ++o) {
        float total = 0.0f, own[kStep];
        for (int k = 0; k < k_len; k += kStep) {
          for (int t = 0; t < kStep; ++t) own[t] = widen(w[(n + o) * k_len + k + t]);
          total = exact_step(total, &held.values[m * k_len + k], own, 1);
        }
        found[m * outputs + n + o] = sums[m * by.lanes + o];
        different += bits_of(total) != bits_of(sums[m * by.lanes + o]);
      }
  }
  for (float x : found) hash.add(x);
  return different;
}

}  // namespace

int main() {
  using namespace detjax;
  std::vector<uint32_t> ex2_bits(kOctave), rcp_bits(kOctave), rsqrt_bits(2 * kOctave);
  for (uint32_t i = 0; i < kOctave; ++i) {
    ex2_bits[i] = 0x3f800000u + i, rcp_bits[i] = 0x3f800000u - i / 2;
    rsqrt_bits[i] = 0x3f800000u - i / 4, rsqrt_bits[kOctave + i] = 0x3f3504f3u - i / 4;
  }
  tables = {ex2_bits.data(), rcp_bits.data(), rsqrt_bits.data()};
  int different = 0;
  for (int lanes : {4, 8, 16}) {
    Hash products;
    for (uint32_t spread : {8u, 40u, 120u, 250u})
      different += compare_products(spread, lanes, products);
    std::printf("products %016llx\n", (unsigned long long)products.value);
  }
  Hash functions;
  state = 7;
  for (int i = 0; i < 2000000; ++i) {
    float x = float_of(draw());
    float unit = (float(draw()) + 0.5f) * 0x1p-32f;
    functions.add(exp(x)), functions.add(log(std::fabs(x))), functions.add(log1p(-unit));
    functions.add(ex2(x)), functions.add(div_full(x, unit + 1.0f));
    functions.add(widen(round_bf16(x))), functions.add(fma(x, unit, 1.0f));
  }
  std::printf("functions %016llx\ndifferent %d\n", (unsigned long long)functions.value, different);
  return different != 0;
}
