// The operators as torch sees them: checks of what is given, then the kernels by dtype.
#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cpu_attend.h"
#include "cpu_experts.h"
#include "cpu_hyper.h"
#include "cpu_index.h"
#include "cpu_linear.h"
#include "cpu_rotate.h"

namespace dsv4 {

using at::Tensor;

template <class E>
const typename E::type* data(const Tensor& t) {
  return static_cast<const typename E::type*>(t.const_data_ptr());
}

// A bfloat16 unit is a pair: odd rows get a zero at the end.
Tensor whole_units(const Tensor& x) {
  bool odd = x.scalar_type() == at::kBFloat16 && x.size(-1) % 2;
  return (odd ? at::constant_pad_nd(x, {0, 1}) : x).contiguous();
}

bool fits(at::ScalarType t) { return t == at::kBFloat16 || t == at::kFloat; }

// Sizes (n, k) of a weight [..., n, k], or of its panels [..., n / 16, k / per, 16, per].
std::pair<int64_t, int64_t> sizes(const Tensor& w, int64_t plain_dims) {
  bool packed = w.dim() == plain_dims + 2;
  TORCH_CHECK(packed || w.dim() == plain_dims, "a weight has ", w.dim(), " dims; ", plain_dims,
              " or ", plain_dims + 2, " are known");
  TORCH_CHECK(w.is_contiguous() && fits(w.scalar_type()), "a weight must be contiguous bfloat16 or float32");
  int64_t d = plain_dims - 2;
  return packed ? std::pair(w.size(d) * w.size(d + 2), w.size(d + 1) * w.size(d + 3))
                : std::pair(w.size(d), w.size(d + 1));
}

Tensor linear(const Tensor& x, const Tensor& w, bool wide) {
  bool grouped = w.dim() == 5;  // panels of [G, N, K]
  TORCH_CHECK(w.dim() >= 4, "a weight must be laid out in panels, not ", w.sizes());
  auto [n, k] = sizes(w, grouped ? 3 : 2);
  int64_t groups = grouped ? w.size(0) : 1;
  TORCH_CHECK(x.scalar_type() == w.scalar_type(), "tokens are ", x.scalar_type(), ", the weight ",
              w.scalar_type());
  TORCH_CHECK(x.dim() >= (grouped ? 2 : 1) && x.size(-1) == k && (!grouped || x.size(-2) == groups),
              "tokens of shape ", x.sizes(), " do not fit a weight of ", groups, " x ", n, " x ", k);
  auto shape = x.sizes().vec();
  shape.back() = n;
  bool half = x.scalar_type() == at::kBFloat16;
  Tensor out = at::empty(shape, x.options().dtype(half && !wide ? at::kBFloat16 : at::kFloat));
  int64_t tokens = k ? x.numel() / (k * groups) : 0;
  Tensor in = x.contiguous();
  if (!half)
    product<F32, F32>(data<F32>(in), data<F32>(w), tokens, groups, n, k,
                      out.mutable_data_ptr<float>());
  else if (wide)
    product<Bf16, F32>(data<Bf16>(in), data<Bf16>(w), tokens, groups, n, k,
                       out.mutable_data_ptr<float>());
  else
    product<Bf16, Bf16>(data<Bf16>(in), data<Bf16>(w), tokens, groups, n, k,
                        static_cast<uint16_t*>(out.mutable_data_ptr()));
  return out;
}

template <class E>
void run_experts(const Tensor& x, const Tensor& weights, const Tensor& slots, const Tensor& w1,
                 const Tensor& w3, const Tensor& w2, double limit, int64_t f, Tensor& out) {
  ExpertWeights<E> w{data<E>(w1), data<E>(w3), data<E>(w2), f, out.size(1), w1.dim() == 5,
                     (float)limit};
  experts<E>(data<E>(x), x.size(1), weights.const_data_ptr<float>(), slots.const_data_ptr<int64_t>(),
             slots.size(0), slots.size(1), w1.size(0), w, out.mutable_data_ptr<float>());
}

Tensor routed(const Tensor& x, const Tensor& weights, const Tensor& slots, const Tensor& w1,
              const Tensor& w3, const Tensor& w2, double limit) {
  auto [f, d] = sizes(w1, 3);
  TORCH_CHECK(w3.sizes() == w1.sizes() && sizes(w2, 3) == std::pair(d, f) && w2.dim() == w1.dim() &&
                  w2.size(0) == w1.size(0),
              "w1 ", w1.sizes(), ", w3 ", w3.sizes(), " and w2 ", w2.sizes(), " do not fit");
  TORCH_CHECK(x.dim() == 2 && x.size(1) == d && slots.dim() == 2 && slots.size(0) == x.size(0) &&
                  weights.sizes() == slots.sizes(),
              "tokens ", x.sizes(), ", weights ", weights.sizes(), " and slots ", slots.sizes(),
              " do not fit experts of width ", d);
  auto type = x.scalar_type();
  TORCH_CHECK(type == w1.scalar_type() && type == w2.scalar_type() && type == w3.scalar_type() &&
                  weights.scalar_type() == at::kFloat && slots.scalar_type() == at::kLong,
              "tokens and expert weights must be of one dtype, weights float32, slots int64");
  Tensor out = at::empty(x.sizes(), x.options().dtype(at::kFloat));
  Tensor in = whole_units(x), scale = weights.contiguous(), where = slots.contiguous();
  const int64_t* s = where.const_data_ptr<int64_t>();
  for (int64_t p = 0; p < where.numel(); ++p)
    TORCH_CHECK(s[p] >= 0 && s[p] < w1.size(0), "slot ", s[p], " of ", w1.size(0));
  if (type == at::kBFloat16)
    run_experts<Bf16>(in, scale, where, w1, w3, w2, limit, f, out);
  else
    run_experts<F32>(in, scale, where, w1, w3, w2, limit, f, out);
  return out;
}

// Checked rows of one pool; an absent pool has none.
template <class E>
KeyRows<E> key_rows(const Tensor& pool, const Tensor& rows, const Tensor& visible) {
  return {data<E>(pool), rows.const_data_ptr<int64_t>(), visible.const_data_ptr<bool>(),
          rows.size(-1), rows.dim() == 3};
}

void check_keys(const Tensor& q, const Tensor& pool, const Tensor& rows, const Tensor& visible,
                const Tensor& blocks) {
  TORCH_CHECK(pool.dim() == 2 && pool.size(1) == q.size(2) && pool.is_contiguous() &&
                  pool.scalar_type() == q.scalar_type(),
              "a pool of ", pool.sizes(), " ", pool.scalar_type(), " does not fit queries of ",
              q.sizes(), " ", q.scalar_type());
  TORCH_CHECK(visible.dim() == 3 && visible.sizes().slice(0, 2) == blocks.sizes() &&
                  visible.scalar_type() == at::kBool && rows.scalar_type() == at::kLong &&
                  (rows.sizes() == visible.sizes() ||
                   (rows.dim() == 2 && rows.size(0) == blocks.size(0) &&
                    rows.size(1) == visible.size(2))),
              "rows ", rows.sizes(), " and visibility ", visible.sizes(), " do not fit blocks ",
              blocks.sizes());
  const int64_t *r = rows.const_data_ptr<int64_t>(), n = pool.size(0);
  bool inside = true;
  for (int64_t i = 0; i < rows.numel(); ++i) inside = inside && r[i] >= 0 && r[i] < n;
  TORCH_CHECK(inside, "a row is not one of the pool's ", n);
}

Tensor attention(const Tensor& q, const Tensor& near, const Tensor& near_rows,
                 const Tensor& near_visible, const Tensor& far, const Tensor& far_rows,
                 const Tensor& far_visible, const Tensor& sink, const Tensor& blocks,
                 const Tensor& place) {
  TORCH_CHECK(q.dim() == 3 && fits(q.scalar_type()), "queries must be [T, H, C] bfloat16 or float32");
  TORCH_CHECK(sink.dim() == 1 && sink.size(0) == q.size(1) && sink.scalar_type() == at::kFloat,
              "there must be one float32 sink for each of ", q.size(1), " heads");
  TORCH_CHECK(blocks.dim() == 2 && blocks.scalar_type() == at::kLong && place.dim() == 1 &&
                  place.size(0) == q.size(0) && place.scalar_type() == at::kLong,
              "blocks ", blocks.sizes(), " and places ", place.sizes(), " do not fit queries ",
              q.sizes());
  Tensor in = whole_units(q), nr = near_rows.contiguous(), nv = near_visible.contiguous();
  Tensor fr = far_rows.contiguous(), fv = far_visible.contiguous(), s = sink.contiguous();
  Tensor b = blocks.contiguous(), p = place.contiguous();
  check_keys(q, near, nr, nv, b);
  check_keys(q, far, fr, fv, b);
  const int64_t *bp = b.const_data_ptr<int64_t>(), *pp = p.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < b.numel(); ++i)
    TORCH_CHECK(bp[i] >= 0 && bp[i] < q.size(0), "blocks name token ", bp[i], " of ", q.size(0));
  for (int64_t i = 0; i < p.numel(); ++i)
    TORCH_CHECK(pp[i] >= 0 && pp[i] < b.numel(), "place ", pp[i], " of ", b.numel());
  Tensor out = at::empty(q.sizes(), q.options());
  auto run = [&](auto element) {
    using E = decltype(element);
    Queries<E> queries{data<E>(in), bp,        s.const_data_ptr<float>(), b.size(0), b.size(1),
                       q.size(1),   q.size(2), in.size(2)};
    attend<E>(queries, key_rows<E>(near, nr, nv), key_rows<E>(far, fr, fv), pp, q.size(0),
              static_cast<typename E::type*>(out.mutable_data_ptr()));
  };
  if (q.scalar_type() == at::kBFloat16)
    run(Bf16{});
  else
    run(F32{});
  return out;
}

Tensor scores(const Tensor& q, const Tensor& weights, const Tensor& pool, const Tensor& rows,
              const Tensor& visible, const Tensor& blocks) {
  TORCH_CHECK(q.dim() == 3 && fits(q.scalar_type()) && weights.dim() == 2 &&
                  weights.sizes() == q.sizes().slice(0, 2) && weights.scalar_type() == at::kFloat,
              "queries ", q.sizes(), " and weights ", weights.sizes(), " do not fit");
  TORCH_CHECK(rows.dim() == 2 && blocks.dim() == 2 && blocks.scalar_type() == at::kLong,
              "keys must be shared by the blocks, not ", rows.sizes());
  Tensor in = whole_units(q), w = weights.contiguous(), r = rows.contiguous();
  Tensor v = visible.contiguous(), b = blocks.contiguous();
  check_keys(q, pool, r, v, b);
  TORCH_CHECK(q.size(2) == in.size(2), "an odd width of bfloat16 is not known");
  const int64_t* bp = b.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < b.numel(); ++i)
    TORCH_CHECK(bp[i] >= 0 && bp[i] < q.size(0), "blocks name token ", bp[i], " of ", q.size(0));
  Tensor out = at::empty(v.sizes(), w.options());
  auto run = [&](auto element) {
    using E = decltype(element);
    IndexQueries<E> queries{data<E>(in), w.const_data_ptr<float>(), bp,       b.size(0),
                            b.size(1),   q.size(1),                 q.size(2)};
    score_entries<E>(queries, data<E>(pool), r.const_data_ptr<int64_t>(), v.const_data_ptr<bool>(),
                     r.size(1), out.mutable_data_ptr<float>());
  };
  q.scalar_type() == at::kBFloat16 ? run(Bf16{}) : run(F32{});
  return out;
}

Tensor pick(const Tensor& scores, int64_t k) {
  TORCH_CHECK(scores.dim() >= 1 && scores.scalar_type() == at::kFloat, "scores must be float32");
  int64_t n = scores.size(-1);
  TORCH_CHECK(k >= 1 && k <= n, "cannot pick ", k, " of ", n);
  auto shape = scores.sizes().vec();
  shape.back() = k;
  Tensor in = scores.contiguous(), out = at::empty(shape, scores.options().dtype(at::kLong));
  pick_rows(in.const_data_ptr<float>(), in.numel() / n, n, k, out.mutable_data_ptr<int64_t>());
  return out;
}

void check_streams(const Tensor& h, std::initializer_list<Tensor> floats) {
  TORCH_CHECK(h.dim() == 3 && fits(h.scalar_type()) && h.size(1) <= kMaxStreams,
              "streams must be [T, M, D] bfloat16 or float32, M at most ", kMaxStreams);
  for (const Tensor& t : floats)
    TORCH_CHECK(t.scalar_type() == at::kFloat, "coefficients must be float32");
}

std::tuple<Tensor, Tensor, Tensor> mixing(const Tensor& h, const Tensor& fn, const Tensor& base,
                                          const Tensor& scale, int64_t iterations, double norm_eps,
                                          double hc_eps) {
  check_streams(h, {fn, base, scale});
  int64_t t = h.size(0), n = h.size(1), d = h.size(2), count = (2 + n) * n;
  TORCH_CHECK(fn.dim() == 2 && fn.size(0) == count && fn.size(1) == n * d &&
                  base.numel() == count && scale.numel() == 3 && iterations > 0,
              "coefficients of ", fn.sizes(), " do not fit streams ", h.sizes());
  auto wide = h.options().dtype(at::kFloat);
  Tensor pre = at::empty({t, n}, wide), post = at::empty({t, n}, wide);
  Tensor comb = at::empty({t, n, n}, wide);
  Tensor in = h.contiguous(), f = fn.contiguous(), b = base.contiguous(), s = scale.contiguous();
  Hyper p{f.const_data_ptr<float>(), b.const_data_ptr<float>(), s.const_data_ptr<float>(), n, d,
          iterations, (float)norm_eps, (float)hc_eps};
  auto run = [&](auto element) {
    using E = decltype(element);
    mix_streams<E>(data<E>(in), t, p, pre.mutable_data_ptr<float>(),
                   post.mutable_data_ptr<float>(), comb.mutable_data_ptr<float>());
  };
  h.scalar_type() == at::kBFloat16 ? run(Bf16{}) : run(F32{});
  return {pre, post, comb};
}

Tensor collapse(const Tensor& h, const Tensor& pre) {
  check_streams(h, {pre});
  TORCH_CHECK(pre.sizes() == h.sizes().slice(0, 2), "coefficients ", pre.sizes(),
              " do not fit streams ", h.sizes());
  Tensor out = at::empty({h.size(0), h.size(2)}, h.options());
  Tensor in = h.contiguous(), c = pre.contiguous();
  auto run = [&](auto element) {
    using E = decltype(element);
    collapse_streams<E>(data<E>(in), c.const_data_ptr<float>(), h.size(0), h.size(1), h.size(2),
                        static_cast<typename E::type*>(out.mutable_data_ptr()));
  };
  h.scalar_type() == at::kBFloat16 ? run(Bf16{}) : run(F32{});
  return out;
}

Tensor expand(const Tensor& y, const Tensor& h, const Tensor& post, const Tensor& comb) {
  check_streams(h, {post, comb});
  int64_t t = h.size(0), n = h.size(1), d = h.size(2);
  TORCH_CHECK(y.scalar_type() == h.scalar_type() && y.sizes() == at::IntArrayRef({t, d}) &&
                  post.sizes() == at::IntArrayRef({t, n}) &&
                  comb.sizes() == at::IntArrayRef({t, n, n}),
              "y ", y.sizes(), ", post ", post.sizes(), " and comb ", comb.sizes(),
              " do not fit streams ", h.sizes());
  Tensor out = at::empty(h.sizes(), h.options());
  Tensor in = h.contiguous(), own = y.contiguous(), p = post.contiguous(), c = comb.contiguous();
  auto run = [&](auto element) {
    using E = decltype(element);
    expand_streams<E>(data<E>(own), data<E>(in), p.const_data_ptr<float>(),
                      c.const_data_ptr<float>(), t, n, d,
                      static_cast<typename E::type*>(out.mutable_data_ptr()));
  };
  h.scalar_type() == at::kBFloat16 ? run(Bf16{}) : run(F32{});
  return out;
}

// cos and sin are x's in their first dims and 1 in the others but the last.
Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin, bool inverse) {
  TORCH_CHECK(fits(x.scalar_type()) && cos.scalar_type() == at::kFloat &&
                  sin.scalar_type() == at::kFloat,
              "rows must be bfloat16 or float32, cos and sin float32");
  int64_t dims = x.dim(), shared = 0, angles = 1, heads = 1;
  bool fit = dims >= 1 && cos.dim() == dims && sin.sizes() == cos.sizes() &&
             2 * cos.size(-1) <= x.size(-1);
  for (int64_t d = 0; fit && d < dims - 1; ++d) {
    if (shared == d && cos.size(d) == x.size(d)) ++shared, angles *= x.size(d);
    else heads *= x.size(d), fit = cos.size(d) == 1;
  }
  TORCH_CHECK(fit, "cos ", cos.sizes(), " and sin ", sin.sizes(), " do not fit rows ", x.sizes());
  Tensor out = at::empty(x.sizes(), x.options());
  Tensor in = x.contiguous(), c = cos.contiguous(), s = sin.contiguous();
  auto run = [&](auto element) {
    using E = decltype(element);
    rotate_rows<E>(data<E>(in), c.const_data_ptr<float>(), s.const_data_ptr<float>(), angles,
                   heads, x.size(-1), 2 * c.size(-1), inverse,
                   static_cast<typename E::type*>(out.mutable_data_ptr()));
  };
  x.scalar_type() == at::kBFloat16 ? run(Bf16{}) : run(F32{});
  return out;
}

TORCH_LIBRARY_FRAGMENT(dsv4_cpu, m) {
  m.def("rotate(Tensor x, Tensor cos, Tensor sin, bool inverse) -> Tensor");
  m.def(
      "mix(Tensor h, Tensor fn, Tensor base, Tensor scale, int iterations, float norm_eps, "
      "float hc_eps) -> (Tensor, Tensor, Tensor)");
  m.def("collapse(Tensor h, Tensor pre) -> Tensor");
  m.def("expand(Tensor y, Tensor h, Tensor post, Tensor comb) -> Tensor");
  m.def(
      "scores(Tensor q, Tensor weights, Tensor pool, Tensor rows, Tensor visible, Tensor blocks) "
      "-> Tensor");
  m.def("pick(Tensor scores, int k) -> Tensor");
  m.def("linear(Tensor x, Tensor w, bool wide) -> Tensor");
  m.def(
      "experts(Tensor x, Tensor weights, Tensor slots, Tensor w1, Tensor w3, Tensor w2, "
      "float limit) -> Tensor");
  m.def(
      "attend(Tensor q, Tensor near, Tensor near_rows, Tensor near_visible, Tensor far, "
      "Tensor far_rows, Tensor far_visible, Tensor sink, Tensor blocks, Tensor place) -> Tensor");
}

TORCH_LIBRARY_IMPL(dsv4_cpu, CPU, m) {
  m.impl("rotate", &rotate);
  m.impl("scores", &scores);
  m.impl("pick", &pick);
  m.impl("mix", &mixing);
  m.impl("collapse", &collapse);
  m.impl("expand", &expand);
  m.impl("linear", &linear);
  m.impl("experts", &routed);
  m.impl("attend", &attention);
}

}  // namespace dsv4
