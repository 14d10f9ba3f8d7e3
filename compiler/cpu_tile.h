// Register tiles: the inner products all CPU operators are made of.
//
// A panel holds 16 rows of a weight as units of 32 bits (one float, or a pair of bfloat16), unit by
// unit: [units][16 rows]. One instruction multiplies one unit of a token with 16 rows, each in its
// own lane, so every output is one chain of additions over k in ascending order, in float32. The
// result of an output depends on its own row and token only: not on how many tokens share the
// product, how rows are split over threads, or whether panels were laid out at load or just now.
//
// bfloat16 products and roundings take AVX512-BF16 where the compiler has it (denormals count as
// zero there), and plain float32 and integer vectors elsewhere.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace dsv4 {

constexpr int64_t kLanes = 16;
constexpr int kRows = 6;    // tokens of a tile
constexpr int kPanels = 4;  // panels of a tile: 24 accumulators, 4 weights, 1 token in registers

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));

template <class V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
inline void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

inline vf spread(float x) { return x - vf{}; }

// float32 to bfloat16 in the low half of each lane, to nearest even; NaN stays NaN.
inline vu rounded(vf x) {
  vu u = (vu)x;
  vu r = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return (x != x) ? (vu{} + 0x7fc0) : r;
}

struct Bf16 {
  using type = uint16_t;
  static constexpr int64_t per = 2;  // values of a unit

  static inline vf add(vf acc, uint32_t x, vu w) {
#ifdef __AVX512BF16__
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int)x), (__m512bh)w);
#else
    uint32_t low = x << 16, high = x & 0xffff0000u;
    acc += load_float(low) * (vf)(w << 16);
    return acc + load_float(high) * (vf)(w & 0xffff0000u);
#endif
  }
  static inline float load_float(uint32_t bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  // `count` (at most 16) values as float32, the rest zero.
  static inline vf widen(const type* p, int64_t count) {
    typedef uint16_t vh __attribute__((vector_size(32)));
    vh h{};
    if (count >= kLanes)
      std::memcpy(&h, p, 32);
    else
      std::memcpy(&h, p, count * 2);
    return (vf)(__builtin_convertvector(h, vu) << 16);
  }
  static inline void narrow(type* p, vf x, int64_t count) {
    typedef uint16_t vh __attribute__((vector_size(32)));
#ifdef __AVX512BF16__
    vh h = (vh)_mm512_cvtneps_pbh((__m512)x);
#else
    vh h = __builtin_convertvector(rounded(x), vh);
#endif
    if (count >= kLanes)
      std::memcpy(p, &h, 32);
    else
      std::memcpy(p, &h, count * 2);
  }
};

struct F32 {
  using type = float;
  static constexpr int64_t per = 1;

  static inline vf add(vf acc, uint32_t x, vu w) { return acc + Bf16::load_float(x) * (vf)w; }
  static inline vf widen(const type* p, int64_t count) {
    vf v{};
    std::memcpy(&v, p, std::min(count, kLanes) * 4);
    return v;
  }
  static inline void narrow(type* p, vf x, int64_t count) {
    if (count >= kLanes)
      store(p, x);
    else
      std::memcpy(p, &x, count * 4);
  }
};

// acc[m][j] = sum over units of x[m] with panel w[j]. Meanwhile the panels `ahead` vectors further
// on are fetched, so that memory is read while the last rows are multiplied; 0 fetches nothing new.
template <class E, int M, int P>
inline void tile(const uint32_t* const* x, const vu* const* w, int64_t units, int64_t ahead,
                 vf (*out)[kPanels]) {
  vf acc[M][P];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int j = 0; j < P; ++j) acc[m][j] = vf{};
  for (int64_t k = 0; k < units; ++k) {
    vu b[P];
#pragma GCC unroll 4
    for (int j = 0; j < P; ++j) b[j] = w[j][k], __builtin_prefetch(w[j] + k + ahead, 0, 2);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      uint32_t a = x[m][k];
#pragma GCC unroll 4
      for (int j = 0; j < P; ++j) acc[m][j] = E::add(acc[m][j], a, b[j]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int j = 0; j < P; ++j) out[m][j] = acc[m][j];
}

template <class E, int P>
inline void tile_of(int rows, const uint32_t* const* x, const vu* const* w, int64_t units,
                    int64_t ahead, vf (*out)[kPanels]) {
  switch (rows) {
    case 1: return tile<E, 1, P>(x, w, units, ahead, out);
    case 2: return tile<E, 2, P>(x, w, units, ahead, out);
    case 3: return tile<E, 3, P>(x, w, units, ahead, out);
    case 4: return tile<E, 4, P>(x, w, units, ahead, out);
    case 5: return tile<E, 5, P>(x, w, units, ahead, out);
    default: return tile<E, 6, P>(x, w, units, ahead, out);
  }
}

template <class E>
inline void dots(int rows, int panels, const uint32_t* const* x, const vu* const* w, int64_t units,
                 int64_t ahead, vf (*out)[kPanels]) {
  switch (panels) {
    case 1: return tile_of<E, 1>(rows, x, w, units, ahead, out);
    case 2: return tile_of<E, 2>(rows, x, w, units, ahead, out);
    case 3: return tile_of<E, 3>(rows, x, w, units, ahead, out);
    default: return tile_of<E, 4>(rows, x, w, units, ahead, out);
  }
}

// Calls fn(first row, number of rows) for tiles of near equal height, at most Most each.
template <int Most, class Fn>
inline void tiles(int64_t rows, Fn fn) {
  int64_t count = (rows + Most - 1) / Most;
  for (int64_t i = 0; i < count; ++i) {
    int64_t begin = rows * i / count;
    fn(begin, (int)(rows * (i + 1) / count - begin));
  }
}

#define DSV4_SWAP(step, lo, hi)                                    \
  _Pragma("GCC unroll 16") for (int i = 0; i < 16; ++i)            \
    if (!(i & step)) {                                             \
      vu a = r[i], b = r[i + step];                                \
      r[i] = __builtin_shufflevector(a, b, lo);                    \
      r[i + step] = __builtin_shufflevector(a, b, hi);             \
    }
#define DSV4_L(...) __VA_ARGS__

// Transposes 16 x 16 units: four rounds that each swap the off-diagonal halves of blocks.
inline void transpose(vu* r) {
  DSV4_SWAP(8, DSV4_L(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
            DSV4_L(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
  DSV4_SWAP(4, DSV4_L(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
            DSV4_L(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
  DSV4_SWAP(2, DSV4_L(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
            DSV4_L(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
  DSV4_SWAP(1, DSV4_L(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
            DSV4_L(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
}
#undef DSV4_SWAP
#undef DSV4_L

// Lays 16 rows of `count` values out as a panel of ceil(count / per) units. Null rows are zero.
// Meanwhile the 16 rows at `next`, if given, are fetched.
template <class E>
inline void fill_panel(const typename E::type* const* rows, int64_t count, vu* panel,
                       const typename E::type* const* next = nullptr) {
  using T = typename E::type;
  constexpr int64_t step = kLanes * E::per;
  bool whole = true;
  for (int i = 0; i < 16; ++i) whole = whole && rows[i];
  int64_t k = 0;
  for (; whole && k + step <= count; k += step) {
    vu r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = load<vu>(rows[i] + k);
    if (next)
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) __builtin_prefetch(next[i] + k);
    transpose(r);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) panel[k / E::per + i] = r[i];
  }
  for (; k < count; k += step) {
    int64_t left = std::min(step, count - k);
    vu r[16];
    for (int i = 0; i < 16; ++i) {
      r[i] = vu{};
      if (rows[i]) std::memcpy(&r[i], rows[i] + k, left * sizeof(T));
    }
    transpose(r);
    int64_t units = (left + E::per - 1) / E::per;
    for (int64_t u = 0; u < units; ++u) panel[k / E::per + u] = r[u];
  }
}

// A weight [n, k]: row-major, or in panels already.
template <class E>
struct Weight {
  const typename E::type* data;
  int64_t n, k;
  bool packed;

  int64_t units() const { return (k + E::per - 1) / E::per; }
  int64_t panels() const { return (n + kLanes - 1) / kLanes; }
  // Panel p; a row-major weight is laid out into `scratch` (units() vectors).
  const vu* panel(int64_t p, vu* scratch) const {
    if (packed) return (const vu*)data + p * units();
    const typename E::type* rows[kLanes];
    for (int64_t i = 0; i < kLanes; ++i)
      rows[i] = p * kLanes + i < n ? data + (p * kLanes + i) * k : nullptr;
    fill_panel<E>(rows, k, scratch);
    return scratch;
  }
};

// Runs fn(task) for every task, each on whichever of at most `most` threads is free. Tasks are
// independent, so who runs one has no influence on any result.
template <class Fn>
inline void each_task(int64_t tasks, Fn fn, int64_t most = at::get_num_threads()) {
  int64_t threads = at::in_parallel_region() ? 1 : std::min(most, tasks);
  if (threads <= 1) {
    for (int64_t t = 0; t < tasks; ++t) fn(t);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (int64_t t = next++; t < tasks; t = next++) fn(t);
  });
}

// Memory of the calling thread, kept between calls; contents are arbitrary.
template <class V, int Tag>
inline V* scratch(int64_t count) {
  static thread_local std::vector<V> held;
  if ((int64_t)held.size() < count) held.resize(count);
  return held.data();
}

// exp to about 1 ulp: 2^n p(r), r = x - n ln 2. Exact at -inf, inf and NaN.
inline vf exponential(vf x) {
  vf c = x < -104.0f ? spread(-104.0f) : x;
  c = c > 89.0f ? spread(89.0f) : c;
  vf t = c * 1.44269504088896341f;
  vf n = (t + 12582912.0f) - 12582912.0f;  // to nearest
  vf r = c - n * 0.693145751953125f;
  r = r - n * 1.42860682030941723e-6f;
  vf p = spread(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  n = (x != x) ? vf{} : n;
  vi whole = __builtin_convertvector(n, vi);
  vi half = whole >> 1, rest = whole - half;  // in two steps: 2^128 and 2^-150 are no floats
  vf y = p * (vf)((half + 127) << 23) * (vf)((rest + 127) << 23);
  return (x != x) ? x : y;
}

}  // namespace dsv4
