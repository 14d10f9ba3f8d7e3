// The lightning indexer: scores of compressed entries, and the choice of the best of a row.
#pragma once

#include <functional>
#include <limits>

#include "cpu_tile.h"

namespace dsv4 {

template <class E>
struct IndexQueries {
  const typename E::type* q;  // [T, I, J]
  const float* weights;       // [T, I]
  const int64_t* blocks;      // [U, Z]
  int64_t u, z, heads, width;
};

// out [U, Z, E] = sum over heads, in their order, of w relu(q . key); -inf where not visible.
// Keys stand at rows [U, E] of a pool. A task is a run of keys of one block.
template <class E>
void score_entries(const IndexQueries<E>& in, const typename E::type* pool, const int64_t* rows,
                   const bool* visible, int64_t entries, float* out) {
  int64_t units = (in.width + E::per - 1) / E::per, step = kPanels * kLanes;
  int64_t runs = (entries + step - 1) / step;
  each_task(in.u * runs, [&](int64_t task) {
    int64_t u = task / runs, e0 = task % runs * step, here = std::min(step, entries - e0);
    int count = (int)((here + kLanes - 1) / kLanes);
    const typename E::type* keys[kPanels * kLanes] = {};
    int32_t seen[kPanels * kLanes] = {};
    bool any = false;
    for (int64_t z = 0; z < in.z; ++z)
      for (int64_t e = 0; e < here; ++e)
        if (visible[(u * in.z + z) * entries + e0 + e]) {
          any = true;
          keys[e] = pool + rows[u * entries + e0 + e] * in.width;
        }
    vf none = spread(-std::numeric_limits<float>::infinity());
    vu* room = scratch<vu, 9>(kPanels * units);
    const vu* panels[kPanels];
    for (int j = 0; any && j < count; ++j) {
      fill_panel<E>(keys + j * kLanes, in.width, room + j * units);
      panels[j] = room + j * units;
    }
    for (int64_t z = 0; z < in.z; ++z) {
      int64_t place = u * in.z + z, token = in.blocks[place];
      vf total[kPanels] = {}, acc[kRows][kPanels];
      if (any)
        tiles<kRows>(in.heads, [&](int64_t h, int count_m) {
          const uint32_t* x[kRows];
          for (int m = 0; m < count_m; ++m)
            x[m] = (const uint32_t*)(in.q + (token * in.heads + h + m) * in.width);
          dots<E>(count_m, count, x, panels, units, 0, acc);
          for (int m = 0; m < count_m; ++m)
            for (int j = 0; j < count; ++j) {
              vf s = acc[m][j] < 0.0f ? vf{} : acc[m][j];
              total[j] += in.weights[token * in.heads + h + m] * s;
            }
        });
      for (int64_t e = 0; e < here; ++e) seen[e] = visible[place * entries + e0 + e] ? -1 : 0;
      for (int j = 0; j < count; ++j) {
        vf s = load<vi>(seen + j * kLanes) ? total[j] : none;
        F32::narrow(out + place * entries + e0 + j * kLanes, s, here - j * kLanes);
      }
    }
  });
}

// Indices of the k largest of each row, ascending; ties go to the lower index. NaN counts as large.
inline void pick_rows(const float* scores, int64_t rows, int64_t n, int64_t k, int64_t* out) {
  at::parallel_for(0, rows, std::max<int64_t>(1, 8192 / n), [&](int64_t begin, int64_t end) {
    uint32_t *own = scratch<uint32_t, 10>(2 * n), *order = own + n;
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t i = 0; i < n; ++i) {
        float x = scores[r * n + i] + 0.0f;  // -0 is 0
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        own[i] = bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);  // order of the values
      }
      std::memcpy(order, own, n * 4);
      std::nth_element(order, order + k - 1, order + n, std::greater<uint32_t>());
      uint32_t kth = order[k - 1];
      int64_t room = k, at = 0;
      for (int64_t i = 0; i < n; ++i) room -= own[i] > kth;
      for (int64_t i = 0; i < n && at < k; ++i) {
        bool equal = own[i] == kth && room > 0;
        room -= equal;
        if (equal || own[i] > kth) out[r * k + at++] = i;
      }
    }
  });
}

}  // namespace dsv4
