// Routed experts. Pairs (token, k) are sorted by expert; the chosen experts' weights are read once.
#pragma once

#include "cpu_tile.h"

namespace dsv4 {

// Pairs in order of their slots; pairs of one slot keep their order.
struct Sorted {
  std::vector<int64_t> pair;   // [P] token * kept + k
  std::vector<int64_t> slot;   // slots that have pairs
  std::vector<int64_t> begin;  // [slots that have pairs + 1] into `pair`
};

inline Sorted sort_pairs(const int64_t* slots, int64_t count, int64_t num_slots) {
  std::vector<int64_t> at(num_slots + 1, 0);
  for (int64_t p = 0; p < count; ++p) ++at[slots[p] + 1];
  Sorted s;
  s.begin.push_back(0);
  for (int64_t l = 0; l < num_slots; ++l) {
    if (at[l + 1]) s.slot.push_back(l), s.begin.push_back(at[l] + at[l + 1]);
    at[l + 1] += at[l];
  }
  s.pair.resize(count);
  for (int64_t p = 0; p < count; ++p) s.pair[at[slots[p]]++] = p;
  return s;
}

template <class E>
struct ExpertWeights {
  const typename E::type *w1, *w3, *w2;  // [L, F, D], [L, F, D], [L, D, F]
  int64_t f, d;
  bool packed;
  float limit;
};

// weight * silu(min(g, limit)) * clamp(u, -limit, limit)
inline vf activate(vf g, vf u, float weight, float limit) {
  vf top = spread(limit);
  g = g > top ? top : g;
  u = u > top ? top : u;
  u = u < -top ? -top : u;
  return weight * (g / (1.0f + exponential(-g)) * u);
}

// Runs fn(expert, first panel, whether the next bundle of this expert comes next here). With many
// experts each is one task; with few their bundles are, so that every thread has work.
template <class Fn>
inline void each_bundle(int64_t used, int64_t panels, int64_t of, Fn fn) {
  int64_t bundles = (panels + of - 1) / of;
  int64_t together = used >= 4 * at::get_num_threads() ? bundles : 1;
  each_task(used * bundles / together, [&](int64_t task) {
    for (int64_t i = 0; i < together; ++i) {
      int64_t bundle = task * together + i;
      fn(bundle / bundles, bundle % bundles * of, i + 1 < together);
    }
  });
}

// out [T, D] = sum over k, in the order of k, in float32. Tokens start `stride` values apart.
template <class E>
void experts(const typename E::type* x, int64_t stride, const float* weights, const int64_t* slots, int64_t tokens,
             int64_t kept, int64_t num_slots, const ExpertWeights<E>& w, float* out) {
  using T = typename E::type;
  int64_t pairs = tokens * kept;
  Sorted s = sort_pairs(slots, pairs, num_slots);
  int64_t used = (int64_t)s.slot.size();
  Weight<E> up{nullptr, w.f, w.d, w.packed}, down{nullptr, w.d, w.f, w.packed};
  int64_t wide_f = up.panels() * kLanes, wide_d = down.panels() * kLanes;
  T* hidden = scratch<T, 1>(pairs * wide_f);        // in sorted order, rounded once
  float* each = scratch<float, 2>(pairs * wide_d);  // in the order of pairs, not rounded

  constexpr int both = kPanels / 2;  // a tile holds as many panels of w1 as of w3
  each_bundle(used, up.panels(), both, [&](int64_t e, int64_t p0, bool more) {
    int64_t l = s.slot[e], ahead = more && w.packed ? both * up.units() : 0;
    int count = (int)std::min<int64_t>(both, up.panels() - p0);
    Weight<E> gate{w.w1 + l * w.f * w.d, w.f, w.d, w.packed};
    Weight<E> value{w.w3 + l * w.f * w.d, w.f, w.d, w.packed};
    vu* room = w.packed ? nullptr : scratch<vu, 0>(kPanels * up.units());
    const vu* panels[kPanels];
    for (int j = 0; j < count; ++j) {
      panels[2 * j] = gate.panel(p0 + j, room + 2 * j * up.units());
      panels[2 * j + 1] = value.panel(p0 + j, room + (2 * j + 1) * up.units());
    }
    int64_t first = s.begin[e];
    tiles<kRows>(s.begin[e + 1] - first, [&](int64_t at, int rows) {
      const uint32_t* in[kRows];
      for (int m = 0; m < rows; ++m)
        in[m] = (const uint32_t*)(x + s.pair[first + at + m] / kept * stride);
      vf acc[kRows][kPanels];
      dots<E>(rows, 2 * count, in, panels, up.units(), ahead, acc);
      for (int m = 0; m < rows; ++m)
        for (int j = 0; j < count; ++j) {
          vf a = activate(acc[m][2 * j], acc[m][2 * j + 1], weights[s.pair[first + at + m]],
                          w.limit);
          int64_t f = (p0 + j) * kLanes;
          T* h = hidden + (first + at + m) * wide_f + f;
          E::narrow(h, a, w.f - f);
          for (int64_t pad = w.f - f; pad < kLanes; ++pad) h[pad] = 0;
        }
    });
  });

  each_bundle(used, down.panels(), kPanels, [&](int64_t e, int64_t p0, bool more) {
    int64_t l = s.slot[e], ahead = more && w.packed ? kPanels * down.units() : 0;
    int count = (int)std::min<int64_t>(kPanels, down.panels() - p0);
    Weight<E> own{w.w2 + l * w.f * w.d, w.d, w.f, w.packed};
    vu* room = w.packed ? nullptr : scratch<vu, 0>(kPanels * down.units());
    const vu* panels[kPanels];
    for (int j = 0; j < count; ++j) panels[j] = own.panel(p0 + j, room + j * down.units());
    int64_t first = s.begin[e];
    tiles<kRows>(s.begin[e + 1] - first, [&](int64_t at, int rows) {
      const uint32_t* in[kRows];
      for (int m = 0; m < rows; ++m) in[m] = (const uint32_t*)(hidden + (first + at + m) * wide_f);
      vf acc[kRows][kPanels];
      dots<E>(rows, count, in, panels, down.units(), ahead, acc);
      for (int m = 0; m < rows; ++m)
        for (int j = 0; j < count; ++j)
          store(each + s.pair[first + at + m] * wide_d + (p0 + j) * kLanes, acc[m][j]);
    });
  });

  at::parallel_for(0, tokens, std::max<int64_t>(1, 65536 / (kept * wide_d)), [&](int64_t t0,
                                                                               int64_t t1) {
    for (int64_t t = t0; t < t1; ++t)
      for (int64_t c = 0; c < w.d; c += kLanes) {
        vf sum{};
        for (int64_t i = 0; i < kept; ++i) sum += load<vf>(each + (t * kept + i) * wide_d + c);
        F32::narrow(out + t * w.d + c, sum, w.d - c);
      }
  });
}

}  // namespace dsv4
