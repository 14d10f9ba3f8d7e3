// Hyper-connections: 16 tokens at a time, one in each lane, so that the small matrices of a token
// are numbers of a lane and the Sinkhorn iterations need no shuffles.
#pragma once

#include "cpu_tile.h"

namespace dsv4 {

constexpr int64_t kMaxStreams = 8;

struct Hyper {
  const float *fn, *base, *scale;  // [(2 + M) M, M D], [(2 + M) M], [3]
  int64_t streams, dim, iterations;
  float norm_eps, hc_eps;
};

inline vf sigmoid(vf x) { return 1.0f / (1.0f + exponential(-x)); }

// comb [M][M] of 16 tokens: softmax over the last index, then columns and rows in turn.
inline void sinkhorn(vf* comb, int64_t n, int64_t iterations, float eps) {
  for (int64_t i = 0; i < n; ++i) {
    vf top = comb[i * n], sum{};
    for (int64_t j = 1; j < n; ++j) top = comb[i * n + j] > top ? comb[i * n + j] : top;
    for (int64_t j = 0; j < n; ++j) sum += comb[i * n + j] = exponential(comb[i * n + j] - top);
    for (int64_t j = 0; j < n; ++j) comb[i * n + j] = comb[i * n + j] / sum + eps;
  }
  auto normalise = [&](int64_t along, int64_t across) {
    for (int64_t i = 0; i < n; ++i) {
      vf sum{};
      for (int64_t j = 0; j < n; ++j) sum += comb[i * along + j * across];
      vf inverse = 1.0f / (sum + eps);
      for (int64_t j = 0; j < n; ++j) comb[i * along + j * across] *= inverse;
    }
  };
  normalise(1, n);
  for (int64_t k = 1; k < iterations; ++k) normalise(n, 1), normalise(1, n);
}

// pre [T, M], post [T, M] and comb [T, M, M] from the streams h [T, M, D].
template <class E>
void mix_streams(const typename E::type* h, int64_t tokens, const Hyper& p, float* pre, float* post,
                 float* comb) {
  int64_t n = p.streams, width = n * p.dim, count = (2 + n) * n;
  each_task((tokens + kLanes - 1) / kLanes, [&](int64_t task) {
    int64_t t0 = task * kLanes, here = std::min(kLanes, tokens - t0);
    float* wide = scratch<float, 7>(kLanes * width);
    vu* panel = scratch<vu, 8>(width);
    const float* rows[kLanes] = {};
    for (int64_t t = 0; t < here; ++t) {
      for (int64_t c = 0; c < width; c += kLanes)
        F32::narrow(wide + t * width + c, E::widen(h + (t0 + t) * width + c, width - c), width - c);
      rows[t] = wide + t * width;
    }
    fill_panel<F32>(rows, width, panel);
    vf squares[4] = {};
    for (int64_t k = 0; k < width; ++k) squares[k % 4] += (vf)panel[k] * (vf)panel[k];
    vf mean = (squares[0] + squares[1] + squares[2] + squares[3]) / (float)width + p.norm_eps;
    vf factor;
    for (int i = 0; i < kLanes; ++i) factor[i] = 1.0f / std::sqrt(mean[i]);
    vf score[(2 + kMaxStreams) * kMaxStreams], acc[kRows][kPanels];
    tiles<kRows>(count, [&](int64_t o, int rows_here) {
      const uint32_t* x[kRows];
      const vu* w[1] = {panel};
      for (int m = 0; m < rows_here; ++m) x[m] = (const uint32_t*)(p.fn + (o + m) * width);
      dots<F32>(rows_here, 1, x, w, width, 0, acc);
      for (int m = 0; m < rows_here; ++m) {
        int64_t kind = o + m < n ? 0 : o + m < 2 * n ? 1 : 2;
        score[o + m] = acc[m][0] * factor * p.scale[kind] + p.base[o + m];
      }
    });
    sinkhorn(score + 2 * n, n, p.iterations, p.hc_eps);
    for (int64_t i = 0; i < n; ++i) {
      vf a = sigmoid(score[i]) + p.hc_eps, b = 2.0f * sigmoid(score[n + i]);
      for (int64_t t = 0; t < here; ++t)
        pre[(t0 + t) * n + i] = a[t], post[(t0 + t) * n + i] = b[t];
    }
    for (int64_t i = 0; i < n * n; ++i)
      for (int64_t t = 0; t < here; ++t) comb[(t0 + t) * n * n + i] = score[2 * n + i][t];
  });
}

// out [T, D] = sum over streams of pre h.
template <class E>
void collapse_streams(const typename E::type* h, const float* pre, int64_t tokens, int64_t n,
                      int64_t dim, typename E::type* out) {
  at::parallel_for(0, tokens, std::max<int64_t>(1, 16384 / (n * dim)), [&](int64_t a, int64_t b) {
    for (int64_t t = a; t < b; ++t)
      for (int64_t c = 0; c < dim; c += kLanes) {
        vf sum{};
        for (int64_t i = 0; i < n; ++i)
          sum += pre[t * n + i] * E::widen(h + (t * n + i) * dim + c, dim - c);
        E::narrow(out + t * dim + c, sum, dim - c);
      }
  });
}

// out [T, M, D]: out_j = post_j y + sum over i of comb[i, j] h_i.
template <class E>
void expand_streams(const typename E::type* y, const typename E::type* h, const float* post,
                    const float* comb, int64_t tokens, int64_t n, int64_t dim,
                    typename E::type* out) {
  at::parallel_for(0, tokens, std::max<int64_t>(1, 16384 / (n * dim)), [&](int64_t a, int64_t b) {
    for (int64_t t = a; t < b; ++t)
      for (int64_t c = 0; c < dim; c += kLanes) {
        vf own = E::widen(y + t * dim + c, dim - c), in[kMaxStreams];
        for (int64_t i = 0; i < n; ++i) in[i] = E::widen(h + (t * n + i) * dim + c, dim - c);
        for (int64_t j = 0; j < n; ++j) {
          vf sum = post[t * n + j] * own;
          for (int64_t i = 0; i < n; ++i) sum += comb[(t * n + i) * n + j] * in[i];
          E::narrow(out + (t * n + j) * dim + c, sum, dim - c);
        }
      }
  });
}

}  // namespace dsv4
