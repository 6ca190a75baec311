// SPDX-License-Identifier: Apache-2.0
// What is done to a row by itself: norms, rotation, gates, log-softmax, the choice of a token.
#include <limits>

#include "exports.h"

namespace detjax {
namespace {

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
  const DistinctRows distinct(x);
  parallel(pool, distinct.count(), [&](int64_t i) {
    const int64_t m = distinct.rows[i];
    std::vector<float> row(width);
    for (int64_t d = 0; d < width; ++d) row[d] = read(x, m * width + d);
    float sum = square_sum(row.data(), width, is_wide, vec_len, lanes, num_parts);
    float scale = rsqrt(sum / float(width) + eps);
    for (int64_t d = 0; d < width; ++d)
      write(out, m * width + d, (row[d] * scale) * read(gain, d));
  });
  distinct.copy(out);
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

// out[m, i] = round(1 / (1 + exp(-gate[m, O - I + i])) * heads[m, i])
ffi::Error sigmoid_gate(ffi::ThreadPool pool, In heads, In gate, Out out) {
  const int64_t width = dim(heads, 1), pitch = dim(gate, 1);
  parallel_pieces(pool, dim(heads, 0), width, kPiece, [&](int64_t m, int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      const float g = read(gate, (m + 1) * pitch - width + i);
      write(out, m * width + i, sigmoid_times(1.0f, g) * read(heads, m * width + i));
    }
  });
  return ffi::Error::Success();
}

// out = cap * tanh(x * exponent / (2 log2(e)))
ffi::Error softcap(ffi::ThreadPool pool, In x, Out out, float exponent, float cap) {
  const int64_t width = dim(x, 1);
  parallel_pieces(pool, dim(x, 0), width, kPiece, [&](int64_t m, int64_t first, int64_t end) {
    for (int64_t at = m * width + first; at < m * width + end; ++at)
      data<float>(out)[at] = soft_cap(data<float>(x)[at], exponent, cap);
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

}  // namespace

DETJAX_EXPORT(rms_norm, DETJAX_POOL.Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>().Attr<float>("eps")
              .Attr<bool>("is_wide").Attr<int64_t>("vec_len").Attr<int64_t>("lanes")
              .Attr<int64_t>("num_parts"));
DETJAX_EXPORT(rope, DETJAX_POOL.Arg<In>().Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>());
DETJAX_EXPORT(geglu, DETJAX_POOL.Arg<In>().Ret<ffi::AnyBuffer>().Attr<float>("linear")
              .Attr<float>("cubic"));
DETJAX_EXPORT(swiglu, DETJAX_POOL.Arg<In>().Ret<ffi::AnyBuffer>().Attr<float>("alpha")
              .Attr<float>("limit").Attr<float>("shift"));
DETJAX_EXPORT(sigmoid_gate, DETJAX_POOL.Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>());
DETJAX_EXPORT(softcap, DETJAX_POOL.Arg<In>().Ret<ffi::AnyBuffer>().Attr<float>("exponent")
              .Attr<float>("cap"));
DETJAX_EXPORT(gated_rms_norm, DETJAX_POOL.Arg<In>().Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>()
              .Attr<float>("eps").Attr<int64_t>("vec_len").Attr<int64_t>("lanes")
              .Attr<int64_t>("num_parts"));
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
