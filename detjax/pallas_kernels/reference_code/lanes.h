// SPDX-License-Identifier: Apache-2.0
// Products with DETJAX_LANES outputs at once: tensor_core.h includes this for each width of vectors.
#define DETJAX_JOIN(a, b) a##b
#define DETJAX_NAME(a, b) DETJAX_JOIN(a, b)

namespace detjax {
namespace DETJAX_NAME(lanes, DETJAX_LANES) {

constexpr int W = DETJAX_LANES;
constexpr int kAhead = 128;  // weights of a row that are asked into the cache early
typedef float F __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));

template <class V>
inline V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// Add steps of K to W outputs. False if a step was out of range, and the result is not to be used.
inline bool add_steps(const float* w, const float* x, const int32_t* x_exponents,
                             const uint8_t* steps_zero, int steps, float* accumulators) {
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

template <int S, bool SECOND, int... N>
inline I mixed(I a, I b, std::integer_sequence<int, N...>) {
  if constexpr (SECOND) return __builtin_shufflevector(a, b, ((N & S) ? N + W : N + S)...);
  return __builtin_shufflevector(a, b, ((N & S) ? N - S + W : N)...);
}

template <int S>
inline void transpose(I* rows) {
  if constexpr (S < W) {
    auto indices = std::make_integer_sequence<int, W>();
    for (int i = 0; i < W; ++i) {
      if (i & S) continue;
      auto a = rows[i], b = rows[i + S];
      rows[i] = mixed<S, false>(a, b, indices);
      rows[i + S] = mixed<S, true>(a, b, indices);
    }
    transpose<2 * S>(rows);
  }
}

// Unpack `count` of K as [count, W] float32; whether one is too large for add_steps.
inline bool unpack(const Weights& w, int first, int count, float* out) {
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
    const int here = std::min(2 * W, count - k);
    const uint16_t* row = w.data + first + k;
    I rows[W];
    if (w.outputs == W && here == 2 * W) {
      for (int o = 0; o < W; ++o, row += w.stride) {
        rows[o] = load<I>(row);
        __builtin_prefetch(row + kAhead);
      }
    } else {
      for (int o = 0; o < W; ++o, row += w.stride) {
        rows[o] = I{};
        if (o < w.outputs) std::memcpy(&rows[o], row, 2 * here);
      }
    }
    transpose<1>(rows);
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

inline void run_tile(const Tile& tile) {
  alignas(64) float unpacked[kChunk * W];
  const Rows& rows = *tile.rows;
  for (int k = 0; k < tile.count; k += kChunk) {
    int here = std::min(kChunk, tile.count - k);
    bool is_large = unpack(tile.weights, tile.first + k, here, unpacked);
    for (int m = 0; m < tile.num_rows; ++m) {
      size_t row = tile.row_ids ? tile.row_ids[m] : tile.first_row + m;
      size_t at = row * rows.k_len + tile.first_of_rows + k;
      float* accumulators = tile.accumulators + m * W;
      float before[W];
      std::memcpy(before, accumulators, sizeof before);
      if (!is_large && !rows.is_large[row] &&
          add_steps(unpacked, &rows.values[at], &rows.exponents[at],
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

}  // namespace
}  // namespace detjax

#undef DETJAX_LANES
#undef DETJAX_JOIN
#undef DETJAX_NAME
