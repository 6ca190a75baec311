// SPDX-License-Identifier: Apache-2.0
// Mixtures of experts: the router's choice, products of each expert's rows, and their sum.
#pragma once

#include "calls.h"

namespace detjax {
namespace {

// The order of a row's experts: the greatest value first, equal ones by id, the first `top_k` alone.
// Zeros of both signs are equal; NaN is above all.
std::vector<int32_t> ranked(const std::vector<float>& values, int64_t num_experts, int64_t top_k) {
  std::vector<int32_t> keys(num_experts), order(num_experts);
  for (int64_t e = 0; e < num_experts; ++e) {
    const float x = values[e] + 0.0f;
    const int32_t bits = int32_t(bits_of(x == x ? x : float_of(0x7fffffffu)));
    keys[e] = bits ^ ((bits >> 31) & 0x7fffffff);
    order[e] = int32_t(e);
  }
  std::partial_sort(order.begin(), order.begin() + top_k, order.end(), [&](int32_t a, int32_t b) {
    return keys[a] != keys[b] ? keys[a] > keys[b] : a < b;
  });
  return order;
}

// Experts of rows of logits [M, O], of which the first `num_experts` are read, in order of rank: ids
// and weights [M, Q].
ffi::Error route(ffi::ThreadPool pool, In logits, Out ids, Out weights, int64_t num_experts,
                 bool renormalise) {
  const int64_t width = dim(logits, 1), top_k = ids->dimensions()[1];
  int64_t padded = 32;
  while (padded < num_experts) padded *= 2;
  parallel(pool, dim(logits, 0), [&](int64_t m) {
    std::vector<float> values(padded, -kInfinity);
    for (int64_t e = 0; e < num_experts; ++e) {
      const float x = data<float>(logits)[m * width + e] + 0.0f;
      values[e] = x == x ? x : float_of(0x7fffffffu);
    }
    const std::vector<int32_t> order = ranked(values, num_experts, top_k);
    const float greatest = values[order[0]];
    float total = 0.0f;
    std::vector<float> terms(top_k);
    for (int64_t r = 0; r < top_k; ++r) {
      terms[r] = exp(values[order[r]] - greatest);
      total = r ? total + terms[r] : terms[r];
    }
    if (!renormalise) {
      for (float& x : values) x = exp(x - greatest);
      total = pairwise(values.data(), padded);
    }
    for (int64_t r = 0; r < top_k; ++r) {
      data<int32_t>(ids)[m * top_k + r] = order[r];
      data<float>(weights)[m * top_k + r] = terms[r] / total;
    }
  });
  return ffi::Error::Success();
}

// The same by sigmoids, to which `correction` [O] is added for the choice alone.
ffi::Error route_by_sigmoid(ffi::ThreadPool pool, In logits, In correction, Out ids, Out weights,
                            int64_t num_experts, bool renormalise, float scale, float smallest) {
  const int64_t width = dim(logits, 1), top_k = ids->dimensions()[1];
  parallel(pool, dim(logits, 0), [&](int64_t m) {
    std::vector<float> scores(num_experts), corrected(num_experts);
    for (int64_t e = 0; e < num_experts; ++e) {
      scores[e] = 1.0f / (exp(-data<float>(logits)[m * width + e]) + 1.0f);
      corrected[e] = scores[e] + data<float>(correction)[e];
    }
    const std::vector<int32_t> order = ranked(corrected, num_experts, top_k);
    float total = scores[order[0]];
    for (int64_t r = 1; r < top_k; ++r) total = total + scores[order[r]];
    total = total + smallest;
    for (int64_t r = 0; r < top_k; ++r) {
      const float score = scores[order[r]];
      data<int32_t>(ids)[m * top_k + r] = order[r];
      data<float>(weights)[m * top_k + r] = (renormalise ? score / total : score) * scale;
    }
  });
  return ffi::Error::Success();
}

// Slots of one expert, and the row of x that each takes.
struct SlotsOfExpert {
  int64_t expert;
  std::vector<int32_t> slots, rows;
};

// Slots by their experts, ids [S] for R rows, and those that have none of these experts.
struct ExpertSlots {
  std::vector<SlotsOfExpert> present;
  std::vector<int32_t> absent;

  ExpertSlots(const In& ids, int64_t num_rows, int64_t num_experts) {
    const int64_t s_len = dim(ids, 0);
    std::vector<int64_t> group_of(num_experts, -1);
    for (int64_t s = 0; s < s_len; ++s) {
      const int64_t expert = data<int32_t>(ids)[s];
      if (expert < 0 || expert >= num_experts) {
        absent.push_back(int32_t(s));
        continue;
      }
      int64_t& group = group_of[expert];
      if (group < 0) group = int64_t(present.size()), present.push_back({expert, {}, {}});
      present[group].slots.push_back(int32_t(s));
      present[group].rows.push_back(int32_t(s / (s_len / num_rows)));
    }
  }
};

// out[s] = round(x[s / (S / R)] w[ids[s]] + bias[ids[s]]), x [R, K], w [E, N, K], ids [S], bias [E, N]
// or of no elements, all bfloat16. Zeros where there is no such expert. float32 `out` is not rounded.
ffi::Error expert_product(ffi::ThreadPool pool, In x, In ids, In w, In bias, Out out) {
  const int64_t r_len = dim(x, 0), k_len = dim(x, 1), n_len = dim(w, 1);
  const int width = processor.lanes;
  const bool has_bias = bias.element_count();
  const ExpertSlots slots(ids, r_len, dim(w, 0));
  for (int64_t s : slots.absent)
    for (int64_t n = 0; n < n_len; ++n) write(out, s * n_len + n, 0.0f);
  Rows rows;
  rows.resize(r_len, k_len);
  parallel(pool, r_len, [&](int64_t m) { rows.set(m, data<uint16_t>(x) + m * k_len); });
  const int64_t tiles = (n_len + width - 1) / width;
  parallel(pool, int64_t(slots.present.size()) * tiles, [&](int64_t job) {
    const SlotsOfExpert& group = slots.present[job / tiles];
    const int64_t n = job % tiles * width, count = int64_t(group.slots.size());
    const int outputs = std::min<int64_t>(width, n_len - n);
    std::vector<float> totals(count * width, 0.0f);
    Weights weights{data<uint16_t>(w) + (group.expert * n_len + n) * k_len, k_len, outputs, true};
    processor.run({&rows, 0, int(count), weights, 0, int(k_len), 0, totals.data(),
                   group.rows.data()});
    for (int64_t i = 0; i < count; ++i)
      for (int o = 0; o < outputs; ++o) {
        float total = totals[i * width + o];
        if (has_bias) total = total + read(bias, group.expert * n_len + n + o);
        write(out, group.slots[i] * n_len + n + o, total);
      }
  });
  return ffi::Error::Success();
}

// out[m, d] = fma(weights[m, r], y[m, r, d], ...) from 0, in order of rank; y [M, Q, D].
ffi::Error add_experts(ffi::ThreadPool pool, In y, In weights, Out out) {
  const int64_t top_k = dim(y, 1), width = dim(y, 2);
  parallel(pool, dim(y, 0), [&](int64_t m) {
    float* total = data<float>(out) + m * width;
    std::fill_n(total, width, 0.0f);
    for (int64_t r = 0; r < top_k; ++r) {
      const uint16_t* own = data<uint16_t>(y) + (m * top_k + r) * width;
      const float weight = data<float>(weights)[m * top_k + r];
      for (int64_t d = 0; d < width; ++d) total[d] = fma(weight, widen(own[d]), total[d]);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace detjax
