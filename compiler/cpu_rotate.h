// Rotary embedding of the last dims of rows, in interleaved pairs: one pass, float32, one rounding.
#pragma once

#include "cpu_tile.h"

namespace dsv4 {

// x and out [angles, heads, width]; cos and sin [angles, turned / 2]. Dims before the last `turned`
// are copied.
template <class E>
void rotate_rows(const typename E::type* x, const float* cos, const float* sin, int64_t angles,
                 int64_t heads, int64_t width, int64_t turned, bool inverse,
                 typename E::type* out) {
  using T = typename E::type;
  int64_t rest = width - turned, vectors = (turned + kLanes - 1) / kLanes;
  int64_t grain = std::max<int64_t>(1, 32768 / (heads * width));
  at::parallel_for(0, angles, grain, [&](int64_t begin, int64_t end) {
    // Of a pair (a, b): a cos - b sin and b cos + a sin.
    float* own = scratch<float, 12>(vectors * kLanes);
    float* other = scratch<float, 13>(vectors * kLanes);
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t i = 0; i < turned / 2; ++i) {
        float c = cos[t * turned / 2 + i], s = sin[t * turned / 2 + i];
        if (inverse) s = -s;
        own[2 * i] = own[2 * i + 1] = c;
        other[2 * i] = -s, other[2 * i + 1] = s;
      }
      for (int64_t r = t * heads; r < (t + 1) * heads; ++r) {
        std::memcpy(out + r * width, x + r * width, rest * sizeof(T));
        for (int64_t d = 0; d < turned; d += kLanes) {
          vf v = E::widen(x + r * width + rest + d, turned - d);
          vf swapped = __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12,
                                               15, 14);
          vf y = v * load<vf>(own + d) + swapped * load<vf>(other + d);
          E::narrow(out + r * width + rest + d, y, turned - d);
        }
      }
    }
  });
}

}  // namespace dsv4
