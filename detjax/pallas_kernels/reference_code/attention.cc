// SPDX-License-Identifier: Apache-2.0
// Attention over pages of keys and values, and the recurrence of linear attention.
#include <limits>

#include "delta_rule.h"
#include "exports.h"
#include "float32_parts.h"

namespace detjax {
namespace {

constexpr float kEmptyMax = -1e30f;  // the running maximum before any key
constexpr int kRowsAtOnce = 64;
constexpr float kLog2E = 1.44269504088896341f;

// `T` is the type of queries and cache: bits of bfloat16, or float.
template <class T>
struct Attention {
  const T *q, *pages;
  const int32_t *table, *positions;
  const float* sinks;  // of query heads; null if there are none
  T* out;
  int64_t query_len, heads, channels, kv_heads, num_pages, table_len, layer;
  int64_t window, blocks_per_split;  // a window of 0 sees all
  float scale, cap_exponent, cap;  // a cap of 0 is none

  int64_t group() const { return heads / kv_heads; }
  const T* page(int64_t sequence, int64_t block, int half, int64_t kv_head) const {
    int64_t page = layer * num_pages + table[sequence * table_len + block];
    return pages + ((page * 2 + half) * kv_heads + kv_head) * kBlock * channels;
  }
};

// The sum of the weights of `keys`, as four threads of a tensor core's tile hold them.
float weight_sum(const float* w, int keys) {
  float quad[4];
  for (int q = 0; q < 4; ++q) {
    float element[2];
    for (int e = 0; e < 2; ++e) {
      const float* own = w + 2 * q + e;
      float even = own[0], odd = own[8];
      for (int i = 2; i < keys / 8; i += 2) even = even + own[8 * i], odd = odd + own[8 * i + 8];
      element[e] = even + odd;
    }
    quad[q] = element[0] + element[1];
  }
  return (quad[0] + quad[1]) + (quad[2] + quad[3]);
}

// Products of bfloat16 rows and weights.
struct Products {
  int64_t channels;
  Rows queries, weights;
  std::vector<float> decays, tile;
  std::vector<uint16_t> row, values;

  Products(int64_t count, int64_t channels)
      : channels(channels), decays(count), tile(count * processor.lanes), row(kBlock),
        values(kBlock * channels) {
    queries.resize(count, channels), weights.resize(count, kBlock);
  }

  void set_query(int64_t r, const uint16_t* q) { queries.set(r, q); }
  void set_weights(int64_t r, const float* w, float decay) {
    for (int j = 0; j < kBlock; ++j) row[j] = round_bf16(w[j]);
    weights.set(r, row.data()), decays[r] = decay;
  }
  float weight_sum(const float* w) const { return detjax::weight_sum(w, kBlock); }

  // scores[r, j] = queries[r] page[j] for keys j.
  void multiply_keys(const uint16_t* page, int64_t keys, int64_t first, int64_t rows,
                     float* scores) {
    const int width = processor.lanes;
    for (int64_t key = 0; key < keys; key += width) {
      std::fill(tile.begin(), tile.end(), 0.0f);
      Weights w{page + key * channels, channels, width, true};
      processor.run({&queries, int(first), int(rows), w, 0, int(channels), 0, tile.data()});
      for (int64_t r = 0; r < rows; ++r)
        std::memcpy(&scores[(first + r) * kBlock + key], &tile[r * width], 4 * width);
    }
  }

  // out[r] = out[r] * decay + weights[r] page, the product on the accumulator.
  void add_values(const uint16_t* page, int64_t keys, int64_t first, int64_t rows, float* out) {
    const int width = processor.lanes;
    int64_t count = (keys + kStep - 1) / kStep * kStep;
    if (count != keys) {  // what no row sees may be the content of a freed page
      std::fill(values.begin(), values.end(), 0);
      std::memcpy(values.data(), page, 2 * keys * channels);
      page = values.data();
    }
    for (int64_t c = 0; c < channels; c += width) {
      int here = std::min<int64_t>(width, channels - c);
      for (int64_t r = 0; r < rows; ++r)
        for (int o = 0; o < here; ++o)
          tile[r * width + o] = out[(first + r) * channels + c + o] * decays[first + r];
      Weights w{page + c, channels, here, false};
      processor.run({&weights, int(first), int(rows), w, 0, int(count), 0, tile.data()});
      for (int64_t r = 0; r < rows; ++r)
        std::memcpy(&out[(first + r) * channels + c], &tile[r * width], 4 * here);
    }
  }
};

// Products of float32, each of its three bfloat16 parts with those of the other.
struct PartProducts {
  static constexpr int kHalf = kBlock / 2;
  int64_t channels;
  Rows queries[kParts], weights[kParts];
  std::vector<float> decays, tile;
  std::vector<uint16_t> parts[kParts];

  PartProducts(int64_t count, int64_t channels)
      : channels(channels), decays(count), tile(count * processor.lanes) {
    for (int i = 0; i < kParts; ++i) {
      queries[i].resize(count, channels), weights[i].resize(count, kBlock);
      parts[i].resize(kBlock * std::max<int64_t>(channels, 1));
    }
  }

  void cut(const float* from, int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
      uint16_t own[kParts];
      split_bf16(from[i], own);
      for (int p = 0; p < kParts; ++p) parts[p][i] = own[p];
    }
  }
  void set_query(int64_t r, const float* q) {
    cut(q, channels);
    for (int i = 0; i < kParts; ++i) queries[i].set(r, parts[i].data());
  }
  void set_weights(int64_t r, const float* w, float decay) {
    std::vector<uint16_t> rows[kParts];
    for (auto& row : rows) row.resize(kBlock);
    for (int j = 0; j < kBlock; ++j) {
      uint16_t own[kParts];
      split_bf16(w[j], own);
      for (int p = 0; p < kParts; ++p) rows[p][j] = own[p];
    }
    for (int i = 0; i < kParts; ++i) weights[i].set(r, rows[i].data());
    decays[r] = decay;
  }
  float weight_sum(const float* w) const {
    return detjax::weight_sum(w, kHalf) + detjax::weight_sum(w + kHalf, kHalf);
  }

  void multiply_keys(const float* page, int64_t keys, int64_t first, int64_t rows, float* scores) {
    const int width = processor.lanes;
    cut(page, kBlock * channels);
    for (int64_t key = 0; key < keys; key += width) {
      std::fill(tile.begin(), tile.end(), 0.0f);
      for (const auto& [of_q, of_k] : kPairs) {
        Weights w{parts[of_k].data() + key * channels, channels, width, true};
        processor.run(
            {&queries[of_q], int(first), int(rows), w, 0, int(channels), 0, tile.data()});
      }
      for (int64_t r = 0; r < rows; ++r)
        std::memcpy(&scores[(first + r) * kBlock + key], &tile[r * width], 4 * width);
    }
  }

  // out[r] = fma(out[r], decay, product of the first half) + product of the second.
  void add_values(const float* page, int64_t keys, int64_t first, int64_t rows, float* out) {
    const int width = processor.lanes;
    cut(page, keys * channels);
    for (auto& part : parts) std::fill(part.begin() + keys * channels, part.end(), 0);
    for (int64_t c = 0; c < channels; c += width) {
      int here = std::min<int64_t>(width, channels - c);
      for (int half = 0; half < 2; ++half) {
        std::fill(tile.begin(), tile.end(), 0.0f);
        for (const auto& [of_w, of_v] : kPairs) {
          Weights w{parts[of_v].data() + half * kHalf * channels + c, channels, here, false};
          processor.run({&weights[of_w], int(first), int(rows), w, 0, kHalf, half * kHalf,
                         tile.data()});
        }
        for (int64_t r = 0; r < rows; ++r)
          for (int o = 0; o < here; ++o) {
            float& x = out[(first + r) * channels + c + o];
            float product = tile[r * width + o];
            x = half ? x + product : fma(x, decays[first + r], product);
          }
      }
    }
  }
};

// Running maximum, sum of weights and output of some rows.
struct Softmax {
  std::vector<float> maximum, sum, out;
  explicit Softmax(int64_t rows, int64_t channels)
      : maximum(rows, kEmptyMax), sum(rows, 0.0f), out(rows * channels, 0.0f) {}
};

// Some rows of one sequence and one key/value head; a row is a query of a head. `Products` has the
// rows and weights as operands, and multiplies them by a block of keys or values.
template <class T, class Products>
struct AttentionRows {
  const Attention<T>& it;
  int64_t sequence, kv_head, first_row, count;
  std::vector<int64_t> position;
  std::vector<float> scores;
  Products products;
  int64_t last = -1;

  AttentionRows(const Attention<T>& it, int64_t sequence, int64_t kv_head, int64_t first_row,
                int64_t count)
      : it(it), sequence(sequence), kv_head(kv_head), first_row(first_row), count(count),
        scores(count * kBlock), products(count, it.channels) {
    for (int64_t r = 0; r < count; ++r) {
      position.push_back(it.positions[sequence * it.query_len + (first_row + r) / it.group()]);
      last = std::max(last, position.back());
      products.set_query(r, it.q + offset(r));
    }
  }

  int64_t offset(int64_t r) const {
    int64_t row = first_row + r, token = sequence * it.query_len + row / it.group();
    return (token * it.heads + kv_head * it.group() + row % it.group()) * it.channels;
  }
  int64_t earliest(int64_t r) const {
    return it.window ? std::max<int64_t>(0, position[r] - it.window + 1) : 0;
  }
  bool sees(int64_t r, int64_t block) const {
    return position[r] >= block * kBlock && earliest(r) < (block + 1) * kBlock;
  }

  // Weights of a row's keys in a block; its running maximum and sum, and its output's decay.
  void weigh(int64_t r, int64_t block, Softmax& state) {
    float* s = &scores[r * kBlock];
    float largest = -kInfinity;
    for (int j = 0; j < kBlock; ++j) {
      int64_t key = block * kBlock + j;
      if (key > position[r] || key < earliest(r)) s[j] = -kInfinity;
      else if (it.cap > 0.0f) s[j] = soft_cap(s[j], it.cap_exponent, it.cap);
      largest = max_nan(largest, s[j]);
    }
    float before = state.maximum[r], now = max_nan(before, largest * it.scale);
    float decay = ex2(before - now);
    for (int j = 0; j < kBlock; ++j) {
      s[j] = s[j] == -kInfinity ? 0.0f : ex2(fma(s[j], it.scale, -now));
    }
    products.set_weights(r, s, decay);
    state.maximum[r] = now;
    state.sum[r] = fma(state.sum[r], decay, products.weight_sum(s));
  }

  void add_block(int64_t block, Softmax& state) {
    int64_t first = 0, end = count;
    while (first < end && !sees(first, block)) ++first;
    while (end > first && !sees(end - 1, block)) --end;
    if (first == end) return;
    const int64_t keys = std::min<int64_t>(kBlock, last + 1 - block * kBlock);
    products.multiply_keys(it.page(sequence, block, 0, kv_head), keys, first, end - first,
                           scores.data());
    for (int64_t r = first; r < end; ++r) {
      if (sees(r, block)) {
        weigh(r, block, state);
      } else {
        std::fill_n(&scores[r * kBlock], kBlock, 0.0f);
        products.set_weights(r, &scores[r * kBlock], 1.0f);
      }
    }
    products.add_values(it.page(sequence, block, 1, kv_head), keys, first, end - first,
                        state.out.data());
  }

  // Fold a split into the state.
  void merge(const Softmax& split, Softmax& state) {
    for (int64_t r = 0; r < count; ++r) {
      if (split.sum[r] == 0.0f) continue;
      float now = max_nan(state.maximum[r], split.maximum[r]);
      float a = ex2(state.maximum[r] - now), b = ex2(split.maximum[r] - now);
      state.sum[r] = fma(state.sum[r], a, split.sum[r] * b);
      for (int64_t i = r * it.channels; i < (r + 1) * it.channels; ++i)
        state.out[i] = fma(state.out[i], a, split.out[i] * b);
      state.maximum[r] = now;
    }
  }

  // Fold the sink of a row into the state: a split of that score alone, without a value.
  void merge_sink(int64_t r, Softmax& state) {
    const float sink = it.sinks[kv_head * it.group() + (first_row + r) % it.group()];
    const float score = sink * kLog2E, now = max_nan(state.maximum[r], score);
    const float a = ex2(state.maximum[r] - now);
    state.sum[r] = fma(state.sum[r], a, ex2(score - now));
    for (int64_t i = r * it.channels; i < (r + 1) * it.channels; ++i) state.out[i] *= a;
  }

  void run() {
    Softmax state(count, it.channels);
    int64_t from = std::numeric_limits<int64_t>::max();
    for (int64_t r = 0; r < count; ++r)
      if (position[r] >= 0) from = std::min(from, earliest(r));
    const int64_t split_len = it.blocks_per_split * kBlock;
    for (int64_t s = from / split_len; last >= 0 && s <= last / split_len; ++s) {
      Softmax split(count, it.channels);
      for (int64_t i = 0; i < it.blocks_per_split; ++i) {
        int64_t block = s * it.blocks_per_split + i;
        if (block <= last / kBlock) add_block(block, split);
      }
      merge(split, state);
    }
    for (int64_t r = 0; r < count; ++r) {
      if (it.sinks) merge_sink(r, state);
      float inverse = 1.0f / state.sum[r];
      for (int64_t c = 0; c < it.channels; ++c) {
        float out = state.out[r * it.channels + c] * inverse;
        bool is_zero = position[r] < 0 || out == 0.0f;
        it.out[offset(r) + c] = is_zero ? T(0) : rounded<T>(out);
      }
    }
  }
};

// q [B, T, H, C], pages [L, N, 2, K, P, C], table [B, n], positions [B, T], layer [1].
template <class T, class Products>
void attend(ffi::ThreadPool& pool, In& q, In& pages, In& table, In& positions, In& layer, In& sinks,
            Out& out, int64_t window, int64_t blocks_per_split, float scale, float cap_exponent,
            float cap) {
  Attention<T> it{data<T>(q), data<T>(pages), data<int32_t>(table), data<int32_t>(positions),
                  sinks.element_count() ? data<float>(sinks) : nullptr, data<T>(out), dim(q, 1), dim(q, 2), dim(q, 3), dim(pages, 3), dim(pages, 1),
                  dim(table, 1), data<int32_t>(layer)[0], window, blocks_per_split, scale,
                  cap_exponent, cap};
  const int64_t rows = it.query_len * it.group();
  const int64_t parts = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  parallel(pool, dim(q, 0) * it.kv_heads * parts, [&](int64_t job) {
    int64_t first = job % parts * kRowsAtOnce, pair = job / parts;
    AttentionRows<T, Products>(it, pair / it.kv_heads, pair % it.kv_heads, first,
                               std::min<int64_t>(kRowsAtOnce, rows - first))
        .run();
  });
}

ffi::Error attention(ffi::ThreadPool pool, In q, In pages, In table, In positions, In layer,
                     In sinks, Out out, int64_t window, int64_t blocks_per_split, float scale,
                     float cap_exponent, float cap) {
  auto run = is_bf16(q) ? attend<uint16_t, Products> : attend<float, PartProducts>;
  run(pool, q, pages, table, positions, layer, sinks, out, window, blocks_per_split, scale,
      cap_exponent, cap);
  return ffi::Error::Success();
}

}  // namespace

DETJAX_EXPORT(attention, DETJAX_POOL.Arg<In>().Arg<In>().Arg<In>().Arg<In>().Arg<In>().Arg<In>()
              .Ret<ffi::AnyBuffer>().Attr<int64_t>("window").Attr<int64_t>("blocks_per_split")
              .Attr<float>("scale").Attr<float>("cap_exponent").Attr<float>("cap"));
DETJAX_EXPORT(delta_rule, DETJAX_POOL.Arg<In>().Arg<In>().Arg<In>().Arg<In>().Arg<In>().Arg<In>()
              .Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>()
              .Attr<float>("eps").Attr<float>("scale"));

}  // namespace detjax
