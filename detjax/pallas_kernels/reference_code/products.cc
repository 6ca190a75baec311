// SPDX-License-Identifier: Apache-2.0
// Products, of experts and of 8 bits too, and what adds them up.
//
// Here and in the other files: the operations of a model in the bits of a Hopper GPU, as XLA custom
// calls on a CPU. Arrays are row-major. Shapes and dtypes have been checked by the callers in Python.
// Letters are those of detjax/array_types.py.
#include "eight_bits.h"
#include "experts.h"
#include "exports.h"
#include "float32_parts.h"

namespace detjax {
namespace {

constexpr int64_t kJobsOfThread = 16;  // of a product: more are shared more evenly

// out[m, n] = tree(sum of leaf l of x[m] w[n]), x [M, K], w [N, K], both bfloat16.
ffi::Error product(ffi::ThreadPool pool, In x, In w, Out out, int64_t leaf_len) {
  const int64_t k_len = dim(x, 1), n_len = dim(w, 0), num_leaves = k_len / leaf_len;
  const int width = processor.lanes;
  const DistinctRows distinct(x, true);
  const int64_t m_len = distinct.count();
  Rows rows, zeros;
  rows.resize(m_len, k_len);
  parallel(pool, m_len,
           [&](int64_t m) { rows.set(m, data<uint16_t>(x) + distinct.rows[m] * k_len); });
  if (distinct.has_zeros) {
    zeros.resize(1, k_len);
    zeros.set(0, std::vector<uint16_t>(k_len).data());
  }
  // WHY: a thread goes on to the tile that lies behind, which it has asked into the cache.
  const int64_t tiles = (n_len + width - 1) / width, most = pool.num_threads() * kJobsOfThread;
  const int64_t piece = width * std::max<int64_t>(1, tiles / most);
  parallel_pieces(pool, 1, n_len, piece, [&](int64_t, int64_t begin, int64_t end) {
    std::vector<float> leaves(num_leaves * m_len * width), of_zeros(num_leaves * width);
    for (int64_t n = begin; n < end; n += width) {
      const int outputs = std::min<int64_t>(width, end - n);
      const Weights weights{data<uint16_t>(w) + n * k_len, k_len, outputs, true};
      bool has_large = !m_len;  // or that nobody has looked
      auto multiply = [&](const Rows& of, std::vector<float>& sums) {
        const int64_t size = int64_t(of.count) * width;
        for (int64_t leaf = 0; leaf < num_leaves; ++leaf) {
          int first = leaf * leaf_len;
          processor.run({&of, 0, of.count, weights, first, int(leaf_len), first,
                         sums.data() + leaf * size, nullptr, &has_large});
        }
        pairwise_rows(sums.data(), num_leaves, size);
      };
      std::fill(leaves.begin(), leaves.end(), 0.0f);
      std::fill(of_zeros.begin(), of_zeros.end(), 0.0f);
      multiply(rows, leaves);
      // A sum of zeros is +0, except where a weight is infinite or NaN.
      if (distinct.has_zeros && has_large) multiply(zeros, of_zeros);
      for (size_t m = 0; m < distinct.place.size(); ++m) {
        const bool is_zero = distinct.place[m] == kZeros;
        const float* sums = is_zero ? of_zeros.data() : &leaves[distinct.place[m] * width];
        std::memcpy(data<float>(out) + m * n_len + n, sums, 4 * outputs);
      }
    }
  });
  return ffi::Error::Success();
}

// out = round(residual + (total + bias)); residual and bias may have no elements.
ffi::Error join(ffi::ThreadPool pool, In total, In residual, In bias, Out out) {
  const int64_t width = dim(total, 1);
  const float* sums = data<float>(total);
  // WHY: a loop that asks for each element what it is uses no vectors.
  with_elements_if_any(residual, [&](auto* added) {
    with_elements_if_any(bias, [&](auto* shift) {
      with_elements(*out, [&](auto* to) {
        parallel(pool, dim(total, 0), [&](int64_t m) {
          for (int64_t i = 0, at = m * width; i < width; ++i, ++at) {
            float sum = sums[at];
            if constexpr (kIsThere<decltype(shift)>) sum = sum + value_of(shift[i]);
            if constexpr (kIsThere<decltype(added)>) sum = value_of(added[at]) + sum;
            to[at] = rounded<std::remove_reference_t<decltype(*to)>>(sum);
          }
        });
      });
    });
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

// --------------------------------------------------------------------------------------- float32

// Rows [M, K] as parts [3, M, K].
ffi::Error split_rows(ffi::ThreadPool pool, In x, Out parts) {
  const int64_t width = dim(x, 1), size = x.element_count();
  parallel(pool, dim(x, 0), [&](int64_t m) {
    for (int64_t i = m * width; i < (m + 1) * width; ++i) {
      uint16_t own[kParts];
      split_bf16(data<float>(x)[i], own);
      for (int p = 0; p < kParts; ++p) data<uint16_t>(parts)[p * size + i] = own[p];
    }
  });
  return ffi::Error::Success();
}

// out = round(residual + (((p3 + p2) + p1) + bias)), parts [3, M, N]; residual and bias may have no
// elements.
ffi::Error add_parts(ffi::ThreadPool pool, In parts, In residual, In bias, Out out) {
  const int64_t width = dim(parts, 2), size = dim(parts, 1) * width;
  const bool has_residual = residual.element_count(), has_bias = bias.element_count();
  parallel(pool, dim(parts, 1), [&](int64_t m) {
    for (int64_t i = m * width; i < (m + 1) * width; ++i) {
      const float* own = data<float>(parts) + i;
      float sum = (own[2 * size] + own[size]) + own[0];
      if (has_bias) sum = sum + read(bias, i % width);
      if (has_residual) sum = read(residual, i) + sum;
      write(out, i, sum);
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

}  // namespace

DETJAX_EXPORT(product, DETJAX_POOL.Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>().Attr<int64_t>("leaf_len"));
DETJAX_EXPORT(expert_product, DETJAX_POOL.Arg<In>().Arg<In>().Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>());
DETJAX_EXPORT(route, DETJAX_POOL.Arg<In>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>()
              .Attr<int64_t>("num_experts").Attr<bool>("renormalise"));
DETJAX_EXPORT(route_by_sigmoid, DETJAX_POOL.Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>()
              .Ret<ffi::AnyBuffer>().Attr<int64_t>("num_experts").Attr<bool>("renormalise")
              .Attr<float>("scale").Attr<float>("smallest"));
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

}  // namespace detjax
