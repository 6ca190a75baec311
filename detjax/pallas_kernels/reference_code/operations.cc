// SPDX-License-Identifier: Apache-2.0
// The operations of a model in the bits of a Hopper GPU, as XLA custom calls on a CPU.
//
// Arrays are row-major. Shapes and dtypes have been checked by the callers in Python. Letters are
// those of detjax/array_types.py.
#include <sys/mman.h>

#include <limits>
#include <new>

#include "calls.h"
#include "delta_rule.h"
#include "eight_bits.h"
#include "experts.h"
#include "float32_parts.h"

namespace detjax {
namespace {

// ------------------------------------------------------------------------------------- products

constexpr int64_t kJobsOfThread = 16;  // of a product: more are shared more evenly

// out[m, n] = tree(sum of leaf l of x[m] w[n]), x [M, K], w [N, K], both bfloat16.
ffi::Error product(ffi::ThreadPool pool, In x, In w, Out out, int64_t leaf_len) {
  const int64_t k_len = dim(x, 1), n_len = dim(w, 0), num_leaves = k_len / leaf_len;
  const int width = processor.lanes;
  const DistinctRows distinct(x);
  const int64_t m_len = distinct.count();
  Rows rows;
  rows.resize(m_len, k_len);
  parallel(pool, m_len,
           [&](int64_t m) { rows.set(m, data<uint16_t>(x) + distinct.rows[m] * k_len); });
  // WHY: a thread goes on to the tile that lies behind, which it has asked into the cache.
  const int64_t tiles = (n_len + width - 1) / width, most = pool.num_threads() * kJobsOfThread;
  const int64_t piece = width * std::max<int64_t>(1, tiles / most);
  parallel_pieces(pool, 1, n_len, piece, [&](int64_t, int64_t begin, int64_t end) {
    const int64_t size = m_len * width;
    std::vector<float> leaves(num_leaves * size);
    for (int64_t n = begin; n < end; n += width) {
      const int outputs = std::min<int64_t>(width, end - n);
      const Weights weights{data<uint16_t>(w) + n * k_len, k_len, outputs, true};
      std::fill(leaves.begin(), leaves.end(), 0.0f);
      for (int64_t leaf = 0; leaf < num_leaves; ++leaf) {
        int first = leaf * leaf_len;
        processor.run({&rows, 0, int(m_len), weights, first, int(leaf_len), first,
                       &leaves[leaf * size]});
      }
      pairwise_rows(leaves.data(), num_leaves, size);
      for (size_t m = 0; m < distinct.place.size(); ++m)
        std::memcpy(data<float>(out) + m * n_len + n, &leaves[distinct.place[m] * width],
                    4 * outputs);
    }
  });
  return ffi::Error::Success();
}

// out = round(residual + (total + bias)); residual and bias may have no elements.
ffi::Error join(ffi::ThreadPool pool, In total, In residual, In bias, Out out) {
  const int64_t width = dim(total, 1);
  const bool has_residual = residual.element_count(), has_bias = bias.element_count();
  parallel(pool, dim(total, 0), [&](int64_t m) {
    for (int64_t i = m * width; i < (m + 1) * width; ++i) {
      float sum = data<float>(total)[i];
      if (has_bias) sum = sum + read(bias, i % width);
      if (has_residual) sum = read(residual, i) + sum;
      write(out, i, sum);
    }
  });
  return ffi::Error::Success();
}

// out = ((l0 + l1) + (l2 + l3)) + ..., leaves along the first axis.
ffi::Error add_leaves(ffi::ThreadPool pool, In leaves, Out out) {
  const int64_t num_leaves = dim(leaves, 0), size = out->element_count(), piece = 4096;
  parallel(pool, (size + piece - 1) / piece, [&](int64_t part) {
    std::vector<float> terms(num_leaves);
    for (int64_t i = part * piece; i < std::min(size, (part + 1) * piece); ++i) {
      for (int64_t leaf = 0; leaf < num_leaves; ++leaf)
        terms[leaf] = data<float>(leaves)[leaf * size + i];
      data<float>(out)[i] = pairwise(terms.data(), num_leaves);
    }
  });
  return ffi::Error::Success();
}

// -------------------------------------------------------------------------------------- adapters

// h[m, x] = round(sums[m, x] * scales[x]) in columns of the row's own adapter, else 0.
ffi::Error lora_hidden(ffi::ThreadPool pool, In sums, In slots, In scales, In columns, Out out) {
  const int64_t width = dim(sums, 1);
  parallel(pool, dim(sums, 0), [&](int64_t m) {
    for (int64_t x = 0; x < width; ++x) {
      bool is_own = data<int32_t>(columns)[x] == data<int32_t>(slots)[m];
      float h = data<float>(sums)[m * width + x] * data<float>(scales)[x];
      write(out, m * width + x, is_own ? h : 0.0f);
    }
  });
  return ffi::Error::Success();
}

// out = round(base + added), and round(base) where nothing is added, so that -0 stays.
ffi::Error add_where_not_zero(ffi::ThreadPool pool, In base, In added, Out out) {
  const int64_t width = dim(base, 1);
  parallel(pool, dim(base, 0), [&](int64_t m) {
    for (int64_t i = m * width; i < (m + 1) * width; ++i) {
      float own = data<float>(base)[i], more = data<float>(added)[i];
      write(out, i, more == 0.0f ? own : own + more);
    }
  });
  return ffi::Error::Success();
}

// ----------------------------------------------------------------------------------- elementwise

// The sum of squares of a row, in the order of `rms_norm.sm90.row_sum`.
float square_sum(const float* x, int64_t width, bool is_wide, int64_t vec_len, int64_t lanes,
                 int64_t num_parts) {
  std::vector<float> terms;
  if (is_wide) {  // a thread's channels by fma; then threads, warps and chunks in pairs
    for (int64_t i = 0; i < width; i += vec_len) {
      float sum = x[i] * x[i];
      for (int64_t v = 1; v < vec_len; ++v) sum = fma(x[i + v], x[i + v], sum);
      terms.push_back(sum);
    }
    std::vector<float> warps;
    for (size_t i = 0; i < terms.size(); i += 32) warps.push_back(pairwise(&terms[i], 32));
    return pairwise(warps.data(), warps.size());
  }
  const int64_t part = width / num_parts, span = lanes * vec_len;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    float sum = 0;
    for (int64_t v = 0; v < vec_len; ++v) {
      float element = 0;
      for (int64_t at = lane * vec_len + v, i = at; i < part; i += span) {
        float square = x[i] * x[i];
        if (num_parts == 2) square = fma(x[part + i], x[part + i], square);
        element = i == at ? square : element + square;
      }
      sum = v ? sum + element : element;
    }
    terms.push_back(sum);
  }
  return pairwise(terms.data(), lanes);
}

// out[m, d] = round((x[m, d] * rsqrt(sum / D + eps)) * gain[d])
ffi::Error rms_norm(ffi::ThreadPool pool, In x, In gain, Out out, float eps, bool is_wide,
                    int64_t vec_len, int64_t lanes, int64_t num_parts) {
  const int64_t width = dim(x, 1);
  parallel(pool, dim(x, 0), [&](int64_t m) {
    std::vector<float> row(width);
    for (int64_t d = 0; d < width; ++d) row[d] = read(x, m * width + d);
    float sum = square_sum(row.data(), width, is_wide, vec_len, lanes, num_parts);
    float scale = rsqrt(sum / float(width) + eps);
    for (int64_t d = 0; d < width; ++d)
      write(out, m * width + d, (row[d] * scale) * read(gain, d));
  });
  return ffi::Error::Success();
}

// Rotate the halves of heads [M, H, C]; two rounded products, one rounded difference or sum.
ffi::Error rope(ffi::ThreadPool pool, In x, In cos, In sin, Out out) {
  const int64_t heads = dim(x, 1), channels = dim(x, 2), half = channels / 2;
  parallel(pool, dim(x, 0), [&](int64_t m) {
    const float *c = data<float>(cos) + m * half, *s = data<float>(sin) + m * half;
    for (int64_t h = m * heads; h < (m + 1) * heads; ++h) {
      for (int64_t i = 0; i < half; ++i) {
        int64_t at = h * channels + i;
        float first = read(x, at), second = read(x, at + half);
        write(out, at, first * c[i] - second * s[i]);
        write(out, at + half, second * c[i] + first * s[i]);
      }
    }
  });
  return ffi::Error::Success();
}

constexpr int64_t kPiece = 256;  // elements of a row that a thread takes at once

// out[m, f] = round(g / (1 + exp(-(alpha * g))) * (u + shift)), gates and ups [M, 2 F], gates at most
// `limit` and ups between its negative and it. Without a clamp alpha is 1, shift 0, limit infinite.
ffi::Error swiglu(ffi::ThreadPool pool, In gate_up, Out out, float alpha, float limit, float shift) {
  const int64_t width = dim(gate_up, 1) / 2;
  const bool is_clamped = limit < kInfinity;
  const DistinctRows distinct(gate_up);
  parallel_pieces(pool, distinct.count(), width, kPiece, [&](int64_t row, int64_t first, int64_t end) {
    const int64_t m = distinct.rows[row], begin = m * 2 * width;
    auto gate = [&](int64_t f) {
      float g = read(gate_up, begin + f);
      return is_clamped ? min_nan(g, limit) : g;
    };
    // WHY: two loops, so that a processor looks up more entries of a table at once.
    float below[kPiece];
    for (int64_t f = first; f < end; ++f)
      below[f - first] = exp(-(is_clamped ? gate(f) * alpha : gate(f))) + 1.0f;
    for (int64_t f = first; f < end; ++f) {
      float u = read(gate_up, begin + width + f);
      if (is_clamped) u = min_nan(max_nan(u, -limit), limit) + shift;
      write(out, m * width + f, div_full(gate(f), below[f - first]) * u);
    }
  });
  distinct.copy(out);
  return ffi::Error::Success();
}

// out[m, f] = round(g / (1 + exp(-g * (g * g * cubic + linear))) * u), gates and ups [M, 2 F].
ffi::Error geglu(ffi::ThreadPool pool, In gate_up, Out out, float linear, float cubic) {
  const int64_t width = dim(gate_up, 1) / 2;
  const DistinctRows distinct(gate_up);
  parallel_pieces(pool, distinct.count(), width, kPiece, [&](int64_t row, int64_t first, int64_t end) {
    const int64_t m = distinct.rows[row];
    for (int64_t f = first; f < end; ++f) {
      int64_t at = m * 2 * width + f;
      float g = read(gate_up, at), u = read(gate_up, at + width);
      float exponent = g * ((g * g) * cubic + linear);
      write(out, m * width + f, div_full(g, exp(-exponent) + 1.0f) * u);
    }
  });
  distinct.copy(out);
  return ffi::Error::Success();
}

// out[m, i] = round(1 / (1 + exp(-gate[m, i])) * heads[m, i])
ffi::Error sigmoid_gate(ffi::ThreadPool pool, In heads, In gate, Out out) {
  const int64_t width = dim(heads, 1);
  parallel_pieces(pool, dim(heads, 0), width, kPiece, [&](int64_t m, int64_t first, int64_t end) {
    for (int64_t at = m * width + first; at < m * width + end; ++at)
      write(out, at, sigmoid_times(1.0f, read(gate, at)) * read(heads, at));
  });
  return ffi::Error::Success();
}

// out[m, c] = round((x[m, c] * rsqrt(sum / C + eps)) * gain[c] * (z / (1 + exp(-z))))
ffi::Error gated_rms_norm(ffi::ThreadPool pool, In x, In z, In gain, Out out, float eps,
                          int64_t vec_len, int64_t lanes, int64_t num_parts) {
  const int64_t width = dim(x, 1);
  parallel(pool, dim(x, 0), [&](int64_t m) {
    const float* row = data<float>(x) + m * width;
    float sum = square_sum(row, width, false, vec_len, lanes, num_parts);
    float scale = rsqrt(sum / float(width) + eps);
    for (int64_t c = 0; c < width; ++c) {
      float gate = read(z, m * width + c);
      write(out, m * width + c, ((row[c] * scale) * read(gain, c)) * sigmoid_times(gate, gate));
    }
  });
  return ffi::Error::Success();
}

// ------------------------------------------------------------------------------------- attention

constexpr int kBlock = 128;          // keys of an online-softmax step, and of a page
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
  float scale;

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

template <class T>
T rounded(float x) {
  if constexpr (std::is_same_v<T, float>) return x;
  return round_bf16(x);
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
            Out& out, int64_t window, int64_t blocks_per_split, float scale) {
  Attention<T> it{data<T>(q), data<T>(pages), data<int32_t>(table), data<int32_t>(positions),
                  sinks.element_count() ? data<float>(sinks) : nullptr, data<T>(out), dim(q, 1), dim(q, 2), dim(q, 3), dim(pages, 3), dim(pages, 1),
                  dim(table, 1), data<int32_t>(layer)[0], window, blocks_per_split, scale};
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
                     In sinks, Out out, int64_t window, int64_t blocks_per_split, float scale) {
  auto run = is_bf16(q) ? attend<uint16_t, Products> : attend<float, PartProducts>;
  run(pool, q, pages, table, positions, layer, sinks, out, window, blocks_per_split, scale);
  return ffi::Error::Success();
}

// ------------------------------------------------------------------------- log-softmax and choice

// A block of 128: a lane's four left to right, then 32 lanes in pairs.
float block_sum(const float* x) {
  float lanes[32];
  for (int i = 0; i < 32; ++i) lanes[i] = ((x[4 * i] + x[4 * i + 1]) + x[4 * i + 2]) + x[4 * i + 3];
  return pairwise(lanes, 32);
}

constexpr int64_t kVocabPiece = 4096;  // logits of a row that a thread takes at once

ffi::Error block_stats(ffi::ThreadPool pool, In logits, Out maxima, Out sums) {
  const int64_t blocks = dim(logits, 1) / kBlock, piece = kVocabPiece / kBlock;
  parallel_pieces(pool, dim(logits, 0), blocks, piece, [&](int64_t m, int64_t first, int64_t end) {
    for (int64_t b = m * blocks + first; b < m * blocks + end; ++b) {
      const float* x = data<float>(logits) + b * kBlock;
      float largest = -kInfinity, weights[kBlock];
      for (int i = 0; i < kBlock; ++i) largest = max_nan(largest, x[i]);
      bool is_empty = largest == -kInfinity;
      for (int i = 0; i < kBlock; ++i) weights[i] = exp(x[i] - (is_empty ? 0.0f : largest));
      data<float>(maxima)[b] = largest;
      data<float>(sums)[b] = is_empty ? 0.0f : block_sum(weights);
    }
  });
  return ffi::Error::Success();
}

ffi::Error log_sum_exp(ffi::ThreadPool pool, In maxima, In sums, Out out) {
  const int64_t blocks = dim(maxima, 1);
  int64_t size = 128;
  while (size < blocks) size *= 2;
  parallel(pool, dim(maxima, 0), [&](int64_t m) {
    const float *tops = data<float>(maxima) + m * blocks, *s = data<float>(sums) + m * blocks;
    std::vector<float> terms(size, 0.0f);
    float top = -kInfinity;
    for (int64_t b = 0; b < blocks; ++b) top = max_nan(top, tops[b]);
    for (int64_t b = 0; b < blocks; ++b) terms[b] = s[b] * exp(tops[b] - top);
    data<float>(out)[m] = top + log(pairwise(terms.data(), size));
  });
  return ffi::Error::Success();
}

// out[m, x] = logits[m, x] - lse[m]
ffi::Error log_probs(In logits, In lse, Out out) {
  ExactFloats exact;
  const int64_t width = dim(logits, 1), size = logits.element_count();
  for (int64_t i = 0; i < size; ++i)
    data<float>(out)[i] = data<float>(logits)[i] - data<float>(lse)[i / width];
  return ffi::Error::Success();
}

uint32_t threefry(uint32_t k0, uint32_t k1, uint32_t counter) {
  const int rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {k0, k1, k0 ^ k1 ^ 0x1bd11bdau};
  uint32_t x0 = counter + keys[0], x1 = keys[1];
  for (int group = 0; group < 5; ++group) {
    for (int r : rotations[group % 2]) {
      x0 += x1;
      x1 = ((x1 << r) | (x1 >> (32 - r))) ^ x0;
    }
    x0 += keys[(group + 1) % 3];
    x1 += keys[(group + 2) % 3] + uint32_t(group + 1);
  }
  return x0;
}

float noise_of(uint32_t bits) {
  float u = (float(bits) + 0.5f) * 0x1p-32f;
  u = u < 0x1.fffffep-1f ? u : 0x1.fffffep-1f;
  return -log(-log1p(-u));
}

ffi::Error gumbel_scores(ffi::ThreadPool pool, In logits, In temperature, In key0, In key1, In first,
                         Out out) {
  const int64_t rows = dim(logits, 0), width = dim(logits, 1);
  parallel_pieces(pool, rows, width, kVocabPiece, [&](int64_t m, int64_t begin, int64_t end) {
    float t = data<float>(temperature)[m];
    uint32_t k0 = data<uint32_t>(key0)[m], k1 = data<uint32_t>(key1)[m];
    for (int64_t v = begin; v < end; ++v) {
      float x = data<float>(logits)[m * width + v];
      uint32_t id = uint32_t(data<int32_t>(first)[0]) + uint32_t(v);
      data<float>(out)[m * width + v] = t == 0.0f ? x : x / t + noise_of(threefry(k0, k1, id));
    }
  });
  return ffi::Error::Success();
}

// The first maximum of each row; a NaN is never the best.
ffi::Error first_maximum(ffi::ThreadPool pool, In scores, In first, Out best, Out token) {
  const int64_t width = dim(scores, 1);
  parallel(pool, dim(scores, 0), [&](int64_t m) {
    float largest = -kInfinity;
    int32_t id = std::numeric_limits<int32_t>::max();
    for (int64_t v = 0; v < width; ++v) {
      float x = data<float>(scores)[m * width + v];
      int32_t own = data<int32_t>(first)[0] + int32_t(v);
      if (x > largest || (x == largest && own < id)) largest = x, id = own;
    }
    data<float>(best)[m] = largest;
    data<int32_t>(token)[m] = id;
  });
  return ffi::Error::Success();
}

// Sums of what stands before each rank in its block, lanes of four by a butterfly.
void scan_block(const float* x, float* before) {
  float total[32], lane_before[32] = {}, partial[32][4];
  for (int lane = 0; lane < 32; ++lane) {
    float sum = 0.0f;
    for (int i = 0; i < 4; ++i) {
      partial[lane][i] = sum;
      sum = i ? sum + x[4 * lane + i] : x[4 * lane];
    }
    total[lane] = sum;
  }
  for (int distance = 1; distance < 32; distance *= 2) {
    float other[32];
    for (int lane = 0; lane < 32; ++lane) other[lane] = total[lane ^ distance];
    for (int lane = 0; lane < 32; ++lane) {
      if (lane & distance) lane_before[lane] = other[lane] + lane_before[lane];
      total[lane] = total[lane] + other[lane];
    }
  }
  for (int i = 0; i < kBlock; ++i) before[i] = lane_before[i / 4] + partial[i / 4][i % 4];
}

ffi::Error nucleus_sums(ffi::ThreadPool pool, In ranked, In temperature, In top_k, In top_p,
                        Out weight, Out before, Out limit) {
  const int64_t width = dim(ranked, 1);
  parallel(pool, dim(ranked, 0), [&](int64_t m) {
    const float* x = data<float>(ranked) + m * width;
    float t = data<float>(temperature)[m];
    t = t == 0.0f ? 1.0f : t;
    float start = 0.0f, counted[kBlock], scanned[kBlock];
    for (int64_t b = 0; b < width; b += kBlock) {
      for (int i = 0; i < kBlock; ++i) {
        float w = exp((x[b + i] - x[0]) / t);
        data<float>(weight)[m * width + b + i] = w;
        counted[i] = b + i < data<int32_t>(top_k)[m] ? w : 0.0f;
      }
      scan_block(counted, scanned);
      for (int i = 0; i < kBlock; ++i)
        data<float>(before)[m * width + b + i] = start + scanned[i];
      start = start + block_sum(counted);
    }
    data<float>(limit)[m] = data<float>(top_p)[m] * start;
  });
  return ffi::Error::Success();
}

ffi::Error adjust_logits(ffi::ThreadPool pool, In logits, In bias, In uses, In above, In below,
                         In per_use, In once, Out out) {
  const int64_t width = dim(logits, 1);
  parallel(pool, dim(logits, 0), [&](int64_t m) {
    for (int64_t i = m * width; i < (m + 1) * width; ++i) {
      float x = data<float>(logits)[i], added = data<float>(bias)[i];
      int32_t used = data<int32_t>(uses)[i];
      if (added != 0.0f) x = x + added;
      if (used > 0) x = x * (x > 0.0f ? data<float>(above)[m] : data<float>(below)[m]);
      if (used > 1) x = (x - data<float>(per_use)[m] * float(used - 1)) - data<float>(once)[m];
      data<float>(out)[i] = x;
    }
  });
  return ffi::Error::Success();
}

// Memory of large pages, where the system has them: inputs of a table are anywhere in it.
uint32_t* new_table(size_t count) {
  const auto page = std::align_val_t(size_t(1) << 21);
  void* held = ::operator new(count * sizeof(uint32_t), page);
#ifdef MADV_HUGEPAGE
  madvise(held, count * sizeof(uint32_t), MADV_HUGEPAGE);
#endif
  return static_cast<uint32_t*>(held);
}

// The tables are filled by a thread of their own while a program is still being loaded.
enum class Filled : int { kNotYet, kYes, kNever };
std::atomic<Filled> filled{Filled::kNotYet};
std::mutex filling;
std::condition_variable filled_changed;

void tell_filled(Filled state) {
  std::lock_guard<std::mutex> lock(filling);
  filled.store(state);
  filled_changed.notify_all();
}

bool wait_for_tables() {
  if (filled.load(std::memory_order_acquire) == Filled::kNotYet) {
    std::unique_lock<std::mutex> lock(filling);
    filled_changed.wait(lock, [] { return filled.load() != Filled::kNotYet; });
  }
  return filled.load() == Filled::kYes;
}

// An operation that begins when the tables are there.
template <class... Args>
auto with_tables(ffi::Error (*operation)(Args...)) {
  return [operation](Args... args) -> ffi::Error {
    if (wait_for_tables()) return operation(args...);
    return ffi::Error(ffi::ErrorCode::kInternal,
                      "the tables of special functions could not be read: detjax is not whole");
  };
}

}  // namespace

#define DETJAX_POOL ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()
#define DETJAX_EXPORT(name, binding) \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(detjax_##name, with_tables(name), binding)

DETJAX_EXPORT(product, DETJAX_POOL.Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>().Attr<int64_t>("leaf_len"));
DETJAX_EXPORT(expert_product, DETJAX_POOL.Arg<In>().Arg<In>().Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>());
DETJAX_EXPORT(route, DETJAX_POOL.Arg<In>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>()
              .Attr<int64_t>("num_experts").Attr<bool>("renormalise"));
DETJAX_EXPORT(add_experts, DETJAX_POOL.Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>());
DETJAX_EXPORT(quantize_rows, DETJAX_POOL.Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>()
              .Ret<ffi::AnyBuffer>().Attr<float>("largest").Attr<float>("bound")
              .Attr<int64_t>("group_len"));
DETJAX_EXPORT(w8a8_product, DETJAX_POOL.Arg<In>().Arg<In>().Arg<In>().Arg<In>().Arg<In>()
              .Arg<In>().Ret<ffi::AnyBuffer>());
DETJAX_EXPORT(lora_hidden, DETJAX_POOL.Arg<In>().Arg<In>().Arg<In>().Arg<In>()
              .Ret<ffi::AnyBuffer>());
DETJAX_EXPORT(add_where_not_zero, DETJAX_POOL.Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>());
DETJAX_EXPORT(split_rows, DETJAX_POOL.Arg<In>().Ret<ffi::AnyBuffer>());
DETJAX_EXPORT(add_parts, DETJAX_POOL.Arg<In>().Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>());
DETJAX_EXPORT(join, DETJAX_POOL.Arg<In>().Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>());
DETJAX_EXPORT(add_leaves, DETJAX_POOL.Arg<In>().Ret<ffi::AnyBuffer>());
DETJAX_EXPORT(rms_norm, DETJAX_POOL.Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>().Attr<float>("eps")
              .Attr<bool>("is_wide").Attr<int64_t>("vec_len").Attr<int64_t>("lanes")
              .Attr<int64_t>("num_parts"));
DETJAX_EXPORT(rope, DETJAX_POOL.Arg<In>().Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>());
DETJAX_EXPORT(geglu, DETJAX_POOL.Arg<In>().Ret<ffi::AnyBuffer>().Attr<float>("linear")
              .Attr<float>("cubic"));
DETJAX_EXPORT(swiglu, DETJAX_POOL.Arg<In>().Ret<ffi::AnyBuffer>().Attr<float>("alpha")
              .Attr<float>("limit").Attr<float>("shift"));
DETJAX_EXPORT(sigmoid_gate, DETJAX_POOL.Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>());
DETJAX_EXPORT(gated_rms_norm, DETJAX_POOL.Arg<In>().Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>()
              .Attr<float>("eps").Attr<int64_t>("vec_len").Attr<int64_t>("lanes")
              .Attr<int64_t>("num_parts"));
DETJAX_EXPORT(delta_rule, DETJAX_POOL.Arg<In>().Arg<In>().Arg<In>().Arg<In>().Arg<In>().Arg<In>()
              .Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>()
              .Attr<float>("eps").Attr<float>("scale"));
DETJAX_EXPORT(attention, DETJAX_POOL.Arg<In>().Arg<In>().Arg<In>().Arg<In>().Arg<In>().Arg<In>()
              .Ret<ffi::AnyBuffer>().Attr<int64_t>("window").Attr<int64_t>("blocks_per_split")
              .Attr<float>("scale"));
DETJAX_EXPORT(block_stats, DETJAX_POOL.Arg<In>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
DETJAX_EXPORT(log_sum_exp, DETJAX_POOL.Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>());
DETJAX_EXPORT(log_probs, ffi::Ffi::Bind().Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>());
DETJAX_EXPORT(gumbel_scores, DETJAX_POOL.Arg<In>().Arg<In>().Arg<In>().Arg<In>().Arg<In>()
              .Ret<ffi::AnyBuffer>());
DETJAX_EXPORT(first_maximum, DETJAX_POOL.Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>()
              .Ret<ffi::AnyBuffer>());
DETJAX_EXPORT(nucleus_sums, DETJAX_POOL.Arg<In>().Arg<In>().Arg<In>().Arg<In>()
              .Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
DETJAX_EXPORT(adjust_logits, DETJAX_POOL.Arg<In>().Arg<In>().Arg<In>().Arg<In>().Arg<In>().Arg<In>()
              .Arg<In>().Ret<ffi::AnyBuffer>());

}  // namespace detjax

extern "C" {

// Fill the tables, [2^23], [2^23] and [2^24] entries from 1.0 on, by the steps between neighbours.
// Null where they could not be read: every operation then fails.
void detjax_set_tables(const int8_t* ex2, const int8_t* rcp, const int8_t* rsqrt) {
  if (detjax::tables.ex2) return;
  if (!ex2) return detjax::tell_filled(detjax::Filled::kNever);
  const int8_t* steps[] = {ex2, rcp, rsqrt};
  uint32_t* held[3];
  for (int i = 0; i < 3; ++i) {
    const size_t count = (i == 2 ? 2 : 1) * detjax::kOctave;
    held[i] = detjax::new_table(count);
    uint32_t entry = 0x3f800000u;
    for (size_t j = 0; j < count; ++j) held[i][j] = entry += uint32_t(int32_t(steps[i][j]));
  }
  detjax::tables = {held[0], held[1], held[2]};
  detjax::tell_filled(detjax::Filled::kYes);
}

// Use vectors of at most so many float32, for tests; returns how many are used.
int detjax_choose_lanes(int most) {
  detjax::processor = detjax::processor_of(most);
  return detjax::processor.lanes;
}

// One step of one output by the definition, for tests.
float detjax_exact_step(float accumulator, const float* x, const float* w) {
  return detjax::exact_step(accumulator, x, w, 1);
}
}
