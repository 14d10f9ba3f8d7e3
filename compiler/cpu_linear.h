// Products of tokens with weights: x [T, G, K] with w [G, N, K] to [T, G, N], G usually 1.
#pragma once

#include "cpu_tile.h"

namespace dsv4 {

constexpr int64_t kWorthAThread = 1 << 17;  // bytes of panels read: less takes longer to share out

// A run of panels against a range of tokens is one task. The weight [G, N, K] is in panels.
template <class E, class Out>
void product(const typename E::type* x, const typename E::type* w, int64_t tokens, int64_t groups,
             int64_t n, int64_t k, typename Out::type* out) {
  int64_t units = k / E::per, num_panels = n / kLanes;
  int64_t work = groups * n * k * (int64_t)sizeof(*w) * ((tokens + kRows - 1) / kRows);
  int64_t threads =
      std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), work / kWorthAThread));
  // Enough tasks for every thread to have some to choose from: panels apart, then tokens.
  int64_t bundles = (num_panels + kPanels - 1) / kPanels;
  int64_t together = threads > 1 ? std::max<int64_t>(1, groups * bundles / (4 * threads)) : bundles;
  int64_t runs = (bundles + together - 1) / together, parts = 1;
  if (threads > 1) {
    parts = (4 * threads + groups * runs - 1) / (groups * runs);
    parts = std::max<int64_t>(1, std::min(parts, tokens / (4 * kRows)));
  }
  each_task(groups * runs * parts, [&](int64_t task) {
    int64_t g = task / (runs * parts), run = task / parts % runs, part = task % parts;
    int64_t begin = tokens * part / parts, end = tokens * (part + 1) / parts;
    const vu* own = (const vu*)(w + g * n * k);
    int64_t last = std::min(num_panels, (run + 1) * together * kPanels);
    for (int64_t p = run * together * kPanels; p < last; p += kPanels) {
      int count = (int)std::min<int64_t>(kPanels, last - p);
      int64_t ahead = p + kPanels < last ? kPanels * units : 0;
      const vu* panels[kPanels];
      for (int j = 0; j < count; ++j) panels[j] = own + (p + j) * units;
      tiles<kRows>(end - begin, [&](int64_t t0, int rows) {
        const uint32_t* in[kRows];
        for (int m = 0; m < rows; ++m)
          in[m] = (const uint32_t*)(x + ((begin + t0 + m) * groups + g) * k);
        vf acc[kRows][kPanels];
        dots<E>(rows, count, in, panels, units, ahead, acc);
        for (int m = 0; m < rows; ++m)
          for (int j = 0; j < count; ++j)
            Out::narrow(out + ((begin + t0 + m) * groups + g) * n + (p + j) * kLanes, acc[m][j],
                        kLanes);
      });
    }
  }, threads);
}

}  // namespace dsv4
