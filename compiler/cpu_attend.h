// Attention with one key/value row per token, shared by all heads.
//
// A task is one block of queries (or one query, where each has keys of its own or sees few of the
// block's) with some of its rows (query, head). Keys that no query of the task sees are left out, the others stay in order:
// they add exact zeros for the queries that do not see them. So a query's result does not depend on
// the block it stands in, on padding of the tables, or on the number of threads.
#pragma once

#include <limits>

#include "cpu_tile.h"

namespace dsv4 {

constexpr int64_t kRowsAtOnce = 8 * kRows;  // bounds the logits held at a time
constexpr int64_t kAhead = 16;              // keys fetched before they are needed
constexpr int kMixRows = 12, kMixed = 2;    // rows and vectors of values of a tile

// Rows of a pool: [U, S] shared by a block, or [U, Z, S] of each query; visible [U, Z, S].
template <class E>
struct KeyRows {
  const typename E::type* pool;
  const int64_t* rows;
  const bool* visible;
  int64_t count;
  bool own;
};

template <class E>
struct Queries {
  const typename E::type* q;  // [T, H, stride]
  const int64_t* blocks;      // [U, Z] token whose query stands there
  const float* sink;          // [H]
  int64_t u, z, heads, width, stride;
};

// Probabilities as `mix` reads them: float32, or bfloat16 with the pairs of a unit exchanged. The
// instruction adds the second product of a pair first, each with a rounding of its own: so the sum
// is one chain in the order of the keys, and keys of probability 0 change nothing wherever they are.
inline float probability(const float* p, F32, int64_t s) { return p[s]; }
inline float probability(const float* p, Bf16, int64_t s) {
  uint32_t pair;
  std::memcpy(&pair, p + s / 2, sizeof pair);
  return Bf16::load_float(s % 2 ? pair << 16 : pair & 0xffff0000u);
}

// Lays out a row in place, of which every number is one of E's already.
inline void lay_row(float*, int64_t, F32) {}
inline void lay_row(float* row, int64_t wide_keys, Bf16) {
  typedef uint32_t half __attribute__((vector_size(32)));
  for (int64_t s = 0; s < wide_keys; s += kLanes) {
    vu u = load<vu>(row + s);
    half first = __builtin_shufflevector(u, u, 0, 2, 4, 6, 8, 10, 12, 14);
    half second = __builtin_shufflevector(u, u, 1, 3, 5, 7, 9, 11, 13, 15);
    store(row + s / 2, (first & 0xffff0000u) | (second >> 16));
  }
}

#ifdef __AVX512BF16__
// `mix` of bfloat16, two keys at a time. The key beside an odd last one has probability 0.
template <int M>
inline void mix_pairs(const float* const* p, const uint16_t* const* v, int64_t keys, int64_t c,
                      vf (*out)[kMixed]) {
  typedef uint16_t vh __attribute__((vector_size(64)));
  vf acc[M][kMixed];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int j = 0; j < kMixed; ++j) acc[m][j] = vf{};
  for (int64_t s = 0; s < keys; s += 2) {
    vh one = load<vh>(v[s] + c), two = load<vh>(v[s + 1 < keys ? s + 1 : s] + c);
    __builtin_prefetch(v[s + kAhead] + c);
    __builtin_prefetch(v[s + kAhead + 1] + c);
    vu b[kMixed] = {
        (vu)__builtin_shufflevector(two, one, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7,
                                    39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15,
                                    47),
        (vu)__builtin_shufflevector(two, one, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22,
                                    54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30,
                                    62, 31, 63)};
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      uint32_t a;
      std::memcpy(&a, p[m] + s / 2, sizeof a);
#pragma GCC unroll 2
      for (int j = 0; j < kMixed; ++j) acc[m][j] = Bf16::add(acc[m][j], a, b[j]);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int j = 0; j < kMixed; ++j) out[m][j] = acc[m][j];
}
#endif

// out[m][j] = sum over s of p[m][s] * v[s][c + 16 j ...], float32. Values are widened as they come,
// so a tile is high and narrow: 12 rows share the work on two vectors of values.
template <class E, int M>
inline void mix(const float* const* p, const typename E::type* const* v, int64_t keys, int64_t c,
                vf (*out)[kMixed]) {
#ifdef __AVX512BF16__
  if constexpr (E::per == 2) return mix_pairs<M>(p, v, keys, c, out);
#endif
  vf acc[M][kMixed];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int j = 0; j < kMixed; ++j) acc[m][j] = vf{};
  for (int64_t s = 0; s < keys; ++s) {
    vf b[kMixed];
#pragma GCC unroll 2
    for (int j = 0; j < kMixed; ++j) b[j] = E::widen(v[s] + c + j * kLanes, kLanes);
    __builtin_prefetch(v[s + kAhead] + c);  // rows are far apart: the processor cannot guess them
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      float a = probability(p[m], E{}, s);
#pragma GCC unroll 2
      for (int j = 0; j < kMixed; ++j) acc[m][j] += a * b[j];
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int j = 0; j < kMixed; ++j) out[m][j] = acc[m][j];
}

// The same for the last, narrower columns.
template <class E>
inline void mix_end(int rows, const float* const* p, const typename E::type* const* v, int64_t keys,
                    int64_t c, int64_t width, vf (*out)[kMixed]) {
  for (int m = 0; m < rows; ++m)
    for (int j = 0; j < kMixed; ++j) {
      vf acc{};
      int64_t at = c + j * kLanes;
      if (at < width)
        for (int64_t s = 0; s < keys; ++s)
          acc += probability(p[m], E{}, s) * E::widen(v[s] + at, width - at);
      out[m][j] = acc;
    }
}

// Rows beyond `rows` up to the height of the next tile repeat the last one.
template <class E>
inline void mixed(int rows, const float** p, const typename E::type* const* v, int64_t keys,
                  int64_t c, int64_t width, vf (*out)[kMixed]) {
  if (c + kMixed * kLanes > width) return mix_end<E>(rows, p, v, keys, c, width, out);
  for (int m = rows; m < kMixRows; ++m) p[m] = p[rows - 1];
  if (rows <= 4) return mix<E, 4>(p, v, keys, c, out);
  if (rows <= 8) return mix<E, 8>(p, v, keys, c, out);
  return mix<E, 12>(p, v, keys, c, out);
}

// Logits to exp(logit * scale - top) rounded to E, 0 where not visible. Returns top, at least `sink`.
template <class E>
inline float exponentials(float* row, const int32_t* mask, int64_t wide_keys, float scale,
                          float sink) {
  vf most = spread(sink), none = spread(-std::numeric_limits<float>::infinity());
  for (int64_t s = 0; s < wide_keys; s += kLanes) {
    vf x = load<vf>(row + s) * scale;
    x = load<vi>(mask + s) ? x : none;
    store(row + s, x);
    most = x > most ? x : most;
  }
  float top = sink;
  for (int i = 0; i < kLanes; ++i) top = most[i] > top ? most[i] : top;
  for (int64_t s = 0; s < wide_keys; s += kLanes) {
    typename E::type e[kLanes];
    E::narrow(e, exponential(load<vf>(row + s) - top), kLanes);
    store(row + s, E::widen(e, kLanes));
  }
  return top;
}

// What a task works with: its queries, the keys any of them sees, and who sees which.
template <class E>
struct Scene {
  const Queries<E>& in;
  const int64_t* places;  // flat places (u, z) of the queries
  const typename E::type* const* keys;
  const vu* panels;
  const int32_t* mask;  // [queries, wide_keys]
  int64_t num_keys, wide_keys;
};

// Rows [r0, r0 + rows) of a scene, row = query * heads + head. out is [U * Z, H, C].
template <class E>
void attend_rows(const Scene<E>& s, int64_t r0, int64_t rows, typename E::type* const* out) {
  const Queries<E>& in = s.in;
  int64_t units = (in.width + E::per - 1) / E::per, num_panels = s.wide_keys / kLanes;
  float* logits = scratch<float, 3>(kRowsAtOnce * s.wide_keys);
  float inverse[kRowsAtOnce], scale = 1.0f / std::sqrt((float)in.width);
  vf acc[kRows][kPanels];
  for (int64_t p0 = 0; p0 < num_panels; p0 += kPanels) {
    int count = (int)std::min<int64_t>(kPanels, num_panels - p0);
    const vu* w[kPanels];
    for (int j = 0; j < count; ++j) w[j] = s.panels + (p0 + j) * units;
    tiles<kRows>(rows, [&](int64_t t0, int m_count) {
      const uint32_t* x[kRows];
      for (int m = 0; m < m_count; ++m) {
        int64_t r = r0 + t0 + m, token = in.blocks[s.places[r / in.heads]];
        x[m] = (const uint32_t*)(in.q + (token * in.heads + r % in.heads) * in.stride);
      }
      dots<E>(m_count, count, x, w, units, 0, acc);
      for (int m = 0; m < m_count; ++m)
        for (int j = 0; j < count; ++j)
          store(logits + (t0 + m) * s.wide_keys + (p0 + j) * kLanes, acc[m][j]);
    });
  }
  for (int64_t i = 0; i < rows; ++i) {
    int64_t r = r0 + i;
    float sink = in.sink[r % in.heads];
    float* row = logits + i * s.wide_keys;
    float top =
        exponentials<E>(row, s.mask + r / in.heads * s.wide_keys, s.wide_keys, scale, sink);
    inverse[i] = exponential(spread(sink - top))[0];
  }
  tiles<kRows>(rows, [&](int64_t t0, int m_count) {  // sums one by one, in the order of the keys
    float sum[kRows] = {};
    for (int64_t k = 0; k < s.num_keys; ++k)
      for (int m = 0; m < m_count; ++m) sum[m] += logits[(t0 + m) * s.wide_keys + k];
    for (int m = 0; m < m_count; ++m) inverse[t0 + m] = 1.0f / (sum[m] + inverse[t0 + m]);
  });
  for (int64_t i = 0; i < rows; ++i) lay_row(logits + i * s.wide_keys, s.wide_keys, E{});
  vf sums[kMixRows][kMixed];
  for (int64_t c = 0; c < in.width; c += kMixed * kLanes)
    tiles<kMixRows>(rows, [&](int64_t t0, int m_count) {
      const float* p[kMixRows];
      for (int m = 0; m < m_count; ++m) p[m] = logits + (t0 + m) * s.wide_keys;
      mixed<E>(m_count, p, s.keys, s.num_keys, c, in.width, sums);
      for (int m = 0; m < m_count; ++m)
        for (int j = 0; j < kMixed && c + j * kLanes < in.width; ++j) {
          int64_t r = r0 + t0 + m, at = c + j * kLanes;
          E::narrow(out[r / in.heads] + r % in.heads * in.width + at, sums[m][j] * inverse[t0 + m],
                    in.width - at);
        }
    });
}

// One task: `places` are queries of block u that share their keys.
template <class E>
void attend_places(const Queries<E>& in, const KeyRows<E>* sources, const int64_t* places,
                   int64_t num_places, int64_t part, int64_t parts,
                   typename E::type* const* out) {
  using T = typename E::type;
  int64_t most = sources[0].count + sources[1].count + kLanes + kAhead, u = places[0] / in.z;
  const T** keys = scratch<const T*, 4>(most);
  int32_t* mask = scratch<int32_t, 5>(num_places * most);
  int64_t n = 0;
  for (int64_t i = 0; i < num_places * most; ++i) mask[i] = 0;
  for (int f = 0; f < 2; ++f) {
    const KeyRows<E>& k = sources[f];
    const int64_t* rows = k.rows + (k.own ? places[0] : u) * k.count;
    for (int64_t s = 0; s < k.count; ++s) {
      bool any = false;
      for (int64_t i = 0; i < num_places; ++i)
        if (k.visible[places[i] * k.count + s]) any = true, mask[i * most + n] = -1;
      if (any) keys[n++] = k.pool + rows[s] * in.width;
    }
  }
  int64_t wide_keys = (n + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = 1; i < num_places; ++i)
    std::memmove(mask + i * wide_keys, mask + i * most, wide_keys * sizeof(int32_t));
  for (int64_t i = n; i < most; ++i) keys[i] = nullptr;
  int64_t units = (in.width + E::per - 1) / E::per;
  vu* panels = scratch<vu, 6>(wide_keys / kLanes * units);
  for (int64_t p = 0; p < wide_keys / kLanes; ++p)
    fill_panel<E>(keys + p * kLanes, in.width, panels + p * units,
                  (p + 1) * kLanes < wide_keys ? keys + (p + 1) * kLanes : nullptr);
  Scene<E> scene{in, places, keys, panels, mask, n, wide_keys};
  int64_t rows = num_places * in.heads, end = rows * (part + 1) / parts;
  for (int64_t r = rows * part / parts; r < end; r += kRowsAtOnce)
    attend_rows<E>(scene, r, std::min(kRowsAtOnce, end - r), out);
}

// Whether the queries of a block are cheaper one by one, each with the keys it sees, than together
// with the keys any of them sees. Laying a key out costs about as much as multiplying it with
// `kLayRows` rows.
constexpr int64_t kLayRows = 2;
template <class E>
bool apart(const Queries<E>& in, const KeyRows<E>* sources, const int64_t* places, int64_t n) {
  int64_t together = 0, alone = 0;
  for (int f = 0; f < 2; ++f) {
    const KeyRows<E>& k = sources[f];
    uint8_t* any = scratch<uint8_t, 11>(k.count + 1);
    std::memset(any, 0, k.count);
    for (int64_t i = 0; i < n; ++i) {
      const bool* seen = k.visible + places[i] * k.count;
      int64_t own = 0;
      for (int64_t s = 0; s < k.count; ++s) own += seen[s], any[s] |= (uint8_t)seen[s];
      alone += own;
    }
    for (int64_t s = 0; s < k.count; ++s) together += any[s];
  }
  return alone * (kLayRows + in.heads) < together * (kLayRows + n * in.heads);
}

// out [T, H, C]: token t takes the result at place[t].
template <class E>
void attend(const Queries<E>& in, const KeyRows<E>& near, const KeyRows<E>& far,
            const int64_t* place, int64_t tokens, typename E::type* out) {
  using T = typename E::type;
  int64_t row = in.heads * in.width;
  std::vector<int64_t> owner(in.u * in.z, -1);
  for (int64_t t = tokens - 1; t >= 0; --t) owner[place[t]] = t;
  const KeyRows<E> sources[2] = {near, far};
  std::vector<int64_t> places, begin{0};  // tasks: runs of places
  std::vector<T*> target;
  for (int64_t u = 0; u < in.u; ++u) {
    for (int64_t p = u * in.z; p < (u + 1) * in.z; ++p)
      if (owner[p] >= 0) places.push_back(p), target.push_back(out + owner[p] * row);
    int64_t first = begin.back(), n = (int64_t)places.size() - first;
    bool each = far.own || near.own || (n > 1 && apart(in, sources, places.data() + first, n));
    for (int64_t i = 1; each && i < n; ++i) begin.push_back(first + i);
    if (n) begin.push_back(first + n);
  }
  int64_t count = (int64_t)begin.size() - 1, threads = at::get_num_threads(), parts = 1;
  if (count < 2 * threads) parts = std::max<int64_t>(1, std::min(threads, in.heads / 4));
  each_task(count * parts, [&](int64_t task) {
    int64_t b = begin[task / parts], n = begin[task / parts + 1] - b;
    attend_places<E>(in, sources, places.data() + b, n, task % parts, parts, target.data() + b);
  });
  for (int64_t t = 0; t < tokens; ++t)
    if (owner[place[t]] != t) std::memcpy(out + t * row, out + owner[place[t]] * row, row * sizeof(T));
}

}  // namespace dsv4
