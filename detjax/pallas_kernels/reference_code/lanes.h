// SPDX-License-Identifier: Apache-2.0
// Products with DETJAX_LANES outputs at once: tensor_core.h includes this for each width of vectors.
#define DETJAX_JOIN(a, b) a##b
#define DETJAX_NAME(a, b) DETJAX_JOIN(a, b)

namespace detjax {
namespace DETJAX_NAME(lanes, DETJAX_LANES) {

constexpr int W = DETJAX_LANES;
constexpr int kLine = 32;  // weights of a line of the cache
typedef float F __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef int16_t H __attribute__((vector_size(4 * W)));

template <class V>
inline V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// The same number in every lane.
template <int... N>
inline I broadcast(const int32_t* from, std::integer_sequence<int, N...>) {
  float bits;  // GCC loads an integer into another register first
  std::memcpy(&bits, from, sizeof bits);
  F first{bits};
  return (I)__builtin_shufflevector(first, first, (N * 0)...);
}

// Whether a lane has one of these bits.
inline bool has_bits(I lanes, int32_t bits) {
  int64_t halves[W / 2], any = 0;
  lanes &= I{} + bits;
  std::memcpy(halves, &lanes, sizeof lanes);
  for (int64_t half : halves) any |= half;
  return any;
}

// W sums. A lane of `odd` is negative if one of its steps was out of range.
struct Sums {
  F total;
  I odd{};
};

// Add a step of K, whose weights are pairs.
inline void add_step(const I* w, const float* x, const int32_t* x_exponents, Sums& sums) {
  const I exponent_mask = I{} + int32_t(kExponent), sign = I{} + INT32_MIN;
  const I exponents_mask = I{} + 0x7f807f80, high = I{} + int32_t(0xffff0000);
  const int32_t lowest = (127 - 100) << 23, highest = (127 + 90) << 23;
  auto indices = std::make_integer_sequence<int, W>();
  H tops = (H)(w[0] & exponents_mask) + (H)broadcast(x_exponents, indices);
  for (int p = 1; p < kStepPairs; ++p) {
    H e = (H)(w[p] & exponents_mask) + (H)broadcast(x_exponents + p, indices);
    tops = e > tops ? e : tops;
  }
  I top = (I)tops << 16, other = (I)tops & high, own = (I)sums.total & exponent_mask;
  top = other > top ? other : top;
  top = own > top ? own : top;
  F scale = (F)(((254 + kFraction) << 23) - top);
  I first = __builtin_convertvector(sums.total * scale, I), second{};
  for (int p = 0; p < kStepPairs; ++p) {  // each half has less than 2^31
    first += __builtin_convertvector((F)(w[p] << 16) * x[2 * p] * scale, I);
    second += __builtin_convertvector((F)(w[p] & high) * x[2 * p + 1] * scale, I);
  }
  I sum = first + second;
  // Negative if the sum overflowed.
  sums.odd |= ((first ^ sum) & (second ^ sum)) | (top < lowest) | (top > highest);
  I negative = sum >> 31;
  I size = (sum ^ negative) - negative;
  // Without the first bit that does not fit 24, the conversion rounds toward zero.
  size &= ~(size >> 24);
  F value = __builtin_convertvector(size, F) * (F)(top - (kFraction << 23));
  sums.total = (F)((I)value | (negative & sign));
}

// Elements of `a` and `b` in turn, `G` at a time, of each half of every four.
template <int G, bool SECOND, int... N>
inline I interleaved(I a, I b, std::integer_sequence<int, N...>) {
  return __builtin_shufflevector(
      a, b, (N / 4 * 4 + N % 4 / (2 * G) * G + N % G + 2 * SECOND + (N / G % 2 ? W : 0))...);
}

template <int S, bool SECOND, int... N>
inline I mixed(I a, I b, std::integer_sequence<int, N...>) {
  if constexpr (SECOND) return __builtin_shufflevector(a, b, ((N & S) ? N + W : N + S)...);
  return __builtin_shufflevector(a, b, ((N & S) ? N - S + W : N)...);
}

// Transpose blocks of S by S, whose elements are transposed already.
template <int S>
inline void transpose_blocks(I* rows) {
  if constexpr (S < W) {
    auto indices = std::make_integer_sequence<int, W>();
    for (int i = 0; i < W; ++i) {
      if (i & S) continue;
      auto a = rows[i], b = rows[i + S];
      rows[i] = mixed<S, false>(a, b, indices);
      rows[i + S] = mixed<S, true>(a, b, indices);
    }
    transpose_blocks<2 * S>(rows);
  }
}

inline void transpose(I* rows) {
  auto indices = std::make_integer_sequence<int, W>();
  for (I* r = rows; r < rows + W; r += 4) {
    I a = interleaved<1, false>(r[0], r[1], indices), b = interleaved<1, true>(r[0], r[1], indices);
    I c = interleaved<1, false>(r[2], r[3], indices), d = interleaved<1, true>(r[2], r[3], indices);
    r[0] = interleaved<2, false>(a, c, indices), r[1] = interleaved<2, true>(a, c, indices);
    r[2] = interleaved<2, false>(b, d, indices), r[3] = interleaved<2, true>(b, d, indices);
  }
  transpose_blocks<4>(rows);
}

constexpr int kGroup = std::max(2 * W, kStep);  // of K, that are read at once

// The largest operands, as bits of bfloat16 without signs.
struct Largest {
  H sizes{};
  void add(I pair) {
    H size = (H)(pair & (I{} + 0x7fff7fff));
    sizes = size > sizes ? size : sizes;
  }
  bool is_above() const {  // the difference is negative from kLargeBf16 on
    return has_bits((I)((H{} + int16_t(kLargeBf16 - 1)) - sizes), int32_t(0x80008000));
  }
};

// Read pairs of `kGroup` of K from `first` on, or of `count` if there are less.
inline void read_pairs(const Weights& w, int first, int count, I* out, Largest& largest) {
  count = std::min(count, kGroup);
  if (!w.outputs_in_rows) {
    const uint16_t* row = w.data + first * w.stride;
    for (int p = 0; p < count / 2; ++p, row += 2 * w.stride) {
      int32_t own[W] = {};
      for (int o = 0; o < w.outputs; ++o) own[o] = row[o] | row[w.stride + o] << 16;
      out[p] = load<I>(own);
    }
  } else if (w.outputs == W && count == kGroup) {
    for (int k = 0; k < kGroup; k += 2 * W) {
      const uint16_t* row = w.data + first + k;
      for (int o = 0; o < W; ++o, row += w.stride) out[k / 2 + o] = load<I>(row);
      transpose(out + k / 2);
    }
    // The same of the next W outputs, which lie behind these.
    if (first % kLine == 0) {
      const uint16_t* next = w.data + W * w.stride + first;
      for (int o = 0; o < W; ++o, next += w.stride) __builtin_prefetch(next, 0, 2);
    }
  } else {
    for (int k = 0; k < count; k += 2 * W) {
      const uint16_t* row = w.data + first + k;
      const int bytes = 2 * std::min(2 * W, count - k);
      for (int o = 0; o < W; ++o, row += w.stride) {
        out[k / 2 + o] = I{};
        if (o < w.outputs) std::memcpy(out + k / 2 + o, row, bytes);
      }
      transpose(out + k / 2);
    }
  }
  for (int p = 0; p < count / 2; ++p) largest.add(out[p]);
}

// Unpack `count` of K as [count / 2, W] pairs; whether one is too large for add_step.
inline bool unpack(const Weights& w, int first, int count, I* out) {
  Largest largest;
  for (int k = 0; k < count; k += kGroup)
    read_pairs(w, first + k, count - k, out + k / 2, largest);
  return largest.is_above();
}

// One step of one output of unpacked weights, by the definition.
inline float exact_step_of(float accumulator, const float* x, const I* pairs, int output) {
  float w[kStep];
  for (int p = 0; p < kStepPairs; ++p) {
    uint32_t pair = pairs[p][output];
    w[2 * p] = float_of(pair << 16), w[2 * p + 1] = float_of(pair & 0xffff0000u);
  }
  return exact_step(accumulator, x, w, 1);
}

// A row's operands from one of K on.
struct Row {
  const float* values;
  const int32_t* exponents;
  const uint8_t* steps_zero;

  void add_step_to(Sums& sums, int s, const I* w) const {
    if (!steps_zero[s]) add_step(w, values + s * kStep, exponents + s * kStepPairs, sums);
  }
};

// Add `count` of K of unpacked weights; false, and nothing is added, if a step is out of range.
inline bool add_unpacked(const I* w, const Row& row, int count, float* accumulators) {
  Sums sums{load<F>(accumulators)};
  for (int s = 0; s < count / kStep; ++s) row.add_step_to(sums, s, w + s * kStepPairs);
  if (has_bits(sums.odd, INT32_MIN)) return false;
  std::memcpy(accumulators, &sums.total, sizeof sums.total);
  return true;
}

// The same for the only row, while the weights are read.
inline bool add_read(const Weights& w, int first, const Row& row, int count, float* accumulators) {
  Sums sums{load<F>(accumulators)};
  Largest largest;
  for (int k = 0; k < count; k += kGroup) {
    I pairs[kGroup / 2];
    read_pairs(w, first + k, count - k, pairs, largest);
    for (int s = 0; s < std::min(kGroup, count - k) / kStep; ++s)
      row.add_step_to(sums, k / kStep + s, pairs + s * kStepPairs);
  }
  if (has_bits(sums.odd, INT32_MIN) || largest.is_above()) return false;
  std::memcpy(accumulators, &sums.total, sizeof sums.total);
  return true;
}

inline void run_tile(const Tile& tile) {
  I unpacked[kChunk / 2];
  const Rows& rows = *tile.rows;
  for (int k = 0; k < tile.count; k += kChunk) {
    const int here = std::min(kChunk, tile.count - k);
    bool is_unpacked = false, is_large = false;
    for (int m = 0; m < tile.num_rows; ++m) {
      const size_t row = tile.row_ids ? tile.row_ids[m] : tile.first_row + m;
      const size_t at = row * rows.k_len + tile.first_of_rows + k;
      const Row own{&rows.values[at], &rows.exponents[at / 2], &rows.steps_zero[at / kStep]};
      float* accumulators = tile.accumulators + m * W;
      if (tile.num_rows == 1 && !rows.is_large[row] &&
          add_read(tile.weights, tile.first + k, own, here, accumulators))
        continue;
      if (!is_unpacked) is_large = unpack(tile.weights, tile.first + k, here, unpacked);
      is_unpacked = true;
      if (is_large && tile.has_large) *tile.has_large = true;
      if (!is_large && !rows.is_large[row] && add_unpacked(unpacked, own, here, accumulators))
        continue;
      for (int o = 0; o < tile.weights.outputs; ++o)
        for (int s = 0; s < here / kStep; ++s)
          accumulators[o] = exact_step_of(accumulators[o], own.values + s * kStep,
                                          unpacked + s * kStepPairs, o);
    }
  }
}

}  // namespace
}  // namespace detjax

#undef DETJAX_LANES
#undef DETJAX_JOIN
#undef DETJAX_NAME
