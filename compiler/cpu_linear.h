// Products of tokens with weights: x [T, G, K] with w [G, N, K] to [T, G, N], G usually 1.
#pragma once

#include "cpu_tile.h"

namespace dsv4 {

// A bundle of panels against a range of tokens is one task. The weight [G, N, K] is in panels.
template <class E, class Out>
void product(const typename E::type* x, const typename E::type* w, int64_t tokens, int64_t groups,
             int64_t n, int64_t k, typename Out::type* out) {
  int64_t units = k / E::per, bundles = (n / kLanes + kPanels - 1) / kPanels;
  int64_t threads = at::get_num_threads(), parts = 1;
  if (threads > 1) {  // few weights and many tokens: split the tokens too
    parts = (8 * threads + groups * bundles - 1) / (groups * bundles);
    parts = std::max<int64_t>(1, std::min(parts, tokens / (4 * kRows)));
  }
  each_task(groups * bundles * parts, [&](int64_t task) {
    int64_t g = task / (bundles * parts), b = task / parts % bundles, part = task % parts;
    int64_t begin = tokens * part / parts, end = tokens * (part + 1) / parts;
    int count = (int)std::min<int64_t>(kPanels, n / kLanes - b * kPanels);
    const vu* panels[kPanels];
    for (int j = 0; j < count; ++j)
      panels[j] = (const vu*)(w + g * n * k) + (b * kPanels + j) * units;
    tiles(end - begin, [&](int64_t t0, int rows) {
      const uint32_t* in[kRows];
      for (int m = 0; m < rows; ++m)
        in[m] = (const uint32_t*)(x + ((begin + t0 + m) * groups + g) * k);
      vf acc[kRows][kPanels];
      dots<E>(rows, count, in, panels, units, acc);
      for (int m = 0; m < rows; ++m)
        for (int j = 0; j < count; ++j) {
          int64_t at = (b * kPanels + j) * kLanes;
          Out::narrow(out + ((begin + t0 + m) * groups + g) * n + at, acc[m][j], kLanes);
        }
    });
  });
}

}  // namespace dsv4
