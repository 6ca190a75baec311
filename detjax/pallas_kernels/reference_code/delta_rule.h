// SPDX-License-Identifier: Apache-2.0
// Gated DeltaNet: a state a head, one token after the other.
#pragma once

#include <algorithm>
#include <vector>

#include "calls.h"

namespace detjax {
namespace {

constexpr int64_t kDotSums = 16;    // of a sum over channels: those of c mod 16
constexpr int64_t kNeighbours = 4;  // squares that are added left to right

// By fma in order of channel, 16 sums; then in pairs.
DETJAX_INLINE float dot_of_state(const float* s, const float* x, int64_t channels) {
  float sums[kDotSums];
  for (int64_t j = 0; j < kDotSums; ++j) sums[j] = s[j] * x[j];
  for (int64_t c = kDotSums; c < channels; c += kDotSums)
    for (int64_t j = 0; j < kDotSums; ++j) sums[j] = fma(s[c + j], x[c + j], sums[j]);
  return pairwise(sums, kDotSums);
}

// Everything that a layer gives, and where its results go. Letters as in detjax/array_types.py.
struct DeltaRule {
  const In &filters, &decay, &step, &rows;  // [K, W, Y], [K, G] twice, [L, N, 1, K, P, X]
  const In& states;                         // [L, N, Z, H, c, C]
  const int32_t *table, *positions;         // [B, n], [B, T]
  float *out, *kept;                        // [B T, H, C], [B, S, H, c, C]: S blocks of a sequence
  int64_t layer, batch, tokens, table_len, blocks;
  float eps, scale;  // of the lengths of queries and keys, and on queries
  int64_t width, mixed, keys, group, pages, page_len, row_len, states_len, key_dim, value_dim;

  int64_t block_len() const { return page_len / states_len; }
  int64_t heads() const { return keys * group; }
  int64_t state_size() const { return key_dim * value_dim; }
  int64_t first(int64_t b) const { return positions[b * tokens]; }
  int64_t last(int64_t b) const {
    int64_t found = -1;
    for (int64_t t = 0; t < tokens; ++t) found = std::max<int64_t>(found, positions[b * tokens + t]);
    return found;
  }
  int64_t page_of(int64_t b, int64_t block) const {
    return table[b * table_len + block / states_len];
  }

  // Where in the cache a row's number lies.
  int64_t at_row(int64_t b, int64_t position, int64_t head) const {
    const int64_t page = table[b * table_len + position / page_len];
    return (((layer * pages + page) * keys + head) * page_len + position % page_len) * row_len;
  }

  // A row behind the convolution and its SiLU, rounded.
  void mix(int64_t b, int64_t position, int64_t head, float* y) const {
    for (int64_t i = 0; i < width; ++i) {
      const int64_t from = position - width + 1 + i;
      const int64_t row = from < 0 ? 0 : at_row(b, from, head);
      for (int64_t c = 0; c < mixed; ++c) {
        const float x = from < 0 ? 0.0f : read(rows, row + c);
        const float f = read(filters, (head * width + i) * mixed + c);
        y[c] = i ? fma(f, x, y[c]) : f * x;
      }
    }
    for (int64_t c = 0; c < mixed; ++c) {
      y[c] = sigmoid_times(y[c], y[c]);
      if (is_bf16(rows)) y[c] = widen(round_bf16(y[c]));
    }
  }

  void normalise(float* x) const {
    std::vector<float> sums;
    for (int64_t c = 0; c < key_dim; c += kNeighbours) {
      float sum = x[c] * x[c];
      for (int64_t i = 1; i < kNeighbours; ++i) sum += x[c + i] * x[c + i];
      sums.push_back(sum);
    }
    const float scale = rsqrt(pairwise(sums.data(), sums.size()) + eps);
    for (int64_t c = 0; c < key_dim; ++c) x[c] *= scale;
  }

  // How a head's state fades at a token, and how much of the value is written.
  void gates(int64_t b, int64_t position, int64_t head, int64_t g, float* found) const {
    const int64_t row = at_row(b, position, head) + mixed + g, of_head = head * group + g;
    const float u = read(rows, row + group) + data<float>(step)[of_head];
    const float softplus = max_nan(u, 0.0f) + log1p(exp(-std::fabs(u)));
    found[0] = exp(-(exp(data<float>(decay)[of_head]) * softplus));
    found[1] = sigmoid_times(1.0f, read(rows, row));
  }

  // The state behind a block: of a sequence before this one, or of the cache.
  const float* state_behind(int64_t b, int64_t block, int64_t of_head) const {
    for (int64_t d = b; d-- > 0;) {
      if (last(d) < 0) continue;
      const int64_t begin = first(d) / block_len(), end = last(d) / block_len() + 1;
      for (int64_t other = begin; other < end; ++other)
        if (page_of(d, other) == page_of(b, block) && other % states_len == block % states_len)
          return kept + ((d * blocks + other - begin) * heads() + of_head) * state_size();
    }
    const int64_t place = (layer * pages + page_of(b, block)) * states_len + block % states_len;
    return data<float>(states) + (place * heads() + of_head) * state_size();
  }

  // One sequence and one head of keys with its heads of values.
  void run(int64_t b, int64_t head) const {
    const int64_t begin = first(b) / block_len(), end = last(b) + 1;
    std::vector<float> held(group * state_size()), y(mixed);
    for (int64_t g = 0; g < group && begin; ++g) {
      const float* from = state_behind(b, begin - 1, head * group + g);
      for (int64_t c = 0; c < key_dim; ++c)
        for (int64_t d = 0; d < value_dim; ++d)
          held[g * state_size() + d * key_dim + c] = from[c * value_dim + d];
    }
    for (int64_t t = begin * block_len(); t < end; ++t) {
      mix(b, t, head, y.data());
      float *q = y.data(), *k = q + key_dim;
      normalise(q), normalise(k);
      for (int64_t c = 0; c < key_dim; ++c) q[c] *= scale;
      const bool is_end = t + 1 == end || (t + 1) % block_len() == 0;
      for (int64_t g = 0; g < group; ++g) {
        const int64_t of_head = head * group + g;
        float* state = held.data() + g * state_size();
        const float* v = k + key_dim + g * value_dim;
        float of_gates[2];
        gates(b, t, head, g, of_gates);
        float* result = out + ((b * tokens + t - first(b)) * heads() + of_head) * value_dim;
        for (int64_t d = 0; d < value_dim; ++d, state += key_dim) {
          const float found = of_gates[0] * dot_of_state(state, k, key_dim);
          const float added = (v[d] - found) * of_gates[1];
          for (int64_t c = 0; c < key_dim; ++c) state[c] = fma(k[c], added, state[c] * of_gates[0]);
          if (t >= first(b)) result[d] = dot_of_state(state, q, key_dim);
        }
        if (!is_end) continue;
        float* to = kept + ((b * blocks + t / block_len() - begin) * heads() + of_head) * state_size();
        for (int64_t c = 0; c < key_dim; ++c)
          for (int64_t d = 0; d < value_dim; ++d)
            to[c * value_dim + d] = held[g * state_size() + d * key_dim + c];
      }
    }
  }
};

ffi::Error delta_rule(ffi::ThreadPool pool, In filters, In decay, In step, In rows, In states,
                      In table, In positions, In layer, Out out, Out kept, float eps,
                      float scale) {
  const DeltaRule rule{
      filters, decay, step, rows, states, data<int32_t>(table), data<int32_t>(positions),
      data<float>(out), data<float>(kept), data<int32_t>(layer)[0], dim(positions, 0),
      dim(positions, 1), dim(table, 1), kept->dimensions()[1], eps, scale, dim(filters, 1),
      dim(filters, 2), dim(decay, 0), dim(decay, 1), dim(rows, 1), dim(rows, 4), dim(rows, 5), dim(states, 2),
      dim(states, 4), dim(states, 5)};
  std::memset(out->untyped_data(), 0, out->size_bytes());
  std::memset(kept->untyped_data(), 0, kept->size_bytes());
  // A head's sequences are in order, as one may begin with a state that another leaves.
  parallel(pool, rule.keys, [&](int64_t head) {
    for (int64_t b = 0; b < rule.batch; ++b)
      if (rule.last(b) >= 0) rule.run(b, head);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace detjax
