"""DeepSeek V4 written down once more: dense, slow, in float64, for one sequence.

A transcription of spec sections 3 to 9 and 11, with no pools, pages, rings, chunks or blocks, and
of none of the code under test: it shares with `dsv4` only the names of parameters and the config.
Letters are those of the spec: S tokens, t position, d hidden, H heads, D head width, rd rotary
dims, W window, C streams, r rate, E experts, K experts per token.

A discrete decision (an expert, an index entry, a rounding) that is nearly a tie may fall either way
in another arithmetic. `Notes` records how near each run came, so that a test can say so.
"""

import dataclasses
import math

import torch
from torch import Tensor

from dsv4.config import Config, Kind
from dsv4.params import Attention, Compressor, Hyper, HyperHead, Layer, Mlp, Moe, Params

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclasses.dataclass
class Notes:
    """How near to a tie the decisions of a run came: the smallest of each."""

    choice: float = math.inf  # k-th best score above the next, absolute
    rounding: float = math.inf  # distance of a value from a rounding edge, relative to the value

    def chose(self, scores: Tensor, k: int) -> None:
        """Record a top-k over one row."""
        if scores.numel() > k:
            best = scores.sort(descending=True).values
            self.choice = min(self.choice, float(best[k - 1] - best[k]))

    def rounded(self, distance: Tensor) -> None:
        """Record relative distances from edges."""
        self.rounding = min(self.rounding, float(distance.min()))


@dataclasses.dataclass
class Run:
    """One evaluation: the architecture, whether training's roundings are on, and the notes.

    `plain` and `scaled` are the inverse frequencies of layers without and with a compressor: the
    one quantity that a float64 model takes in float32 (section 3.3), hence given, not derived.
    """

    cfg: Config
    plain: Tensor
    scaled: Tensor
    qat: bool = False
    notes: Notes = dataclasses.field(default_factory=Notes)


# Section 3.


def rms(x: Tensor, w: Tensor | None, eps: float) -> Tensor:
    y = x * (x.pow(2).mean(-1, keepdim=True) + eps) ** -0.5
    return y if w is None else y * w


def pow2ceil(v: float) -> float:
    return 2.0 ** math.ceil(math.log2(v))


def _edge_of_scale(v: float, notes: Notes) -> float:
    near = 2.0 ** round(math.log2(v))
    notes.rounded(torch.tensor(abs(v / near - 1)))
    return pow2ceil(v)


def e4m3(v: Tensor, notes: Notes) -> Tensor:
    """Nearest e4m3 value of |v| <= 448, ties to even. Subnormals step by 2^-9."""
    a = v.abs()
    exponent = torch.floor(torch.log2(a.clamp(min=2.0**-6)))
    step = 2.0 ** (exponent - 3)
    notes.rounded(((a / step) % 1 - 0.5).abs() * step / a.clamp(min=2.0**-10))
    return torch.round(v / step) * step


def e2m1(v: Tensor, notes: Notes) -> Tensor:
    """Nearest fp4 value of |v| <= 6, ties to the even code."""
    out = torch.empty_like(v)
    for i, x in enumerate(v.flatten().tolist()):
        away = [abs(abs(x) - m) for m in _MAGNITUDES]
        order = sorted(range(8), key=lambda c: (away[c], c % 2))
        notes.rounded(torch.tensor((away[order[1]] - away[order[0]]) / max(abs(x), 0.1)))
        out.view(-1)[i] = math.copysign(_MAGNITUDES[order[0]], x)
    return out


def qdq_fp8(x: Tensor, b: int, notes: Notes) -> Tensor:
    out = []
    for block in x.split(b):
        s = _edge_of_scale(max(float(block.abs().max()), 1e-4) / 448, notes)
        out.append(e4m3((block / s).clamp(-448, 448), notes) * s)
    return torch.cat(out)


def qdq_fp4(x: Tensor, notes: Notes) -> Tensor:
    out = []
    for block in x.split(32):
        s = _edge_of_scale(max(float(block.abs().max()), 6 * 2.0**-126) / 6, notes)
        out.append(e2m1((block / s).clamp(-6, 6), notes) * s)
    return torch.cat(out)


def sylvester(n: int) -> Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < n:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


def round_key(x: Tensor, run: Run) -> Tensor:
    """An indexer query or key of one head."""
    n = x.shape[0]
    return qdq_fp4(n**-0.5 * (sylvester(n) @ x), run.notes)


def round_kv(x: Tensor, run: Run) -> Tensor:
    rest = x.shape[0] - run.cfg.rope_dim
    return torch.cat((qdq_fp8(x[:rest], 64, run.notes), x[rest:]))


def frequencies(theta: float, rd: int) -> Tensor:
    return torch.tensor([theta ** (-2 * i / rd) for i in range(rd // 2)], dtype=torch.float64)


def scaled_frequencies(cfg: Config) -> Tensor:
    """With YaRN, as layers with a compressor have them."""
    rd, theta, yarn = cfg.rope_dim, cfg.compress_theta, cfg.yarn
    assert yarn is not None

    def dim(n: float) -> float:
        return rd * math.log(yarn.original / (2 * math.pi * n)) / (2 * math.log(theta))

    lo = max(math.floor(dim(yarn.beta_fast)), 0)
    hi = min(math.ceil(dim(yarn.beta_slow)), rd - 1)
    out = []
    for i, f in enumerate(frequencies(theta, rd).tolist()):
        ramp = min(max((i - lo) / (hi - lo if hi != lo else 0.001), 0), 1)
        out.append(f * (1 - ramp) + f / yarn.factor * ramp)
    return torch.tensor(out, dtype=torch.float64)


def rope(x: Tensor, t: int, f: Tensor, back: bool = False) -> Tensor:
    """Rotate the last dims of `x` [..., D] as at position t."""
    n = 2 * f.shape[0]
    y = x.clone()
    a = t * f * (-1 if back else 1)
    even, odd = x[..., -n::2], x[..., -n + 1 :: 2]
    y[..., -n::2] = even * a.cos() - odd * a.sin()
    y[..., -n + 1 :: 2] = even * a.sin() + odd * a.cos()
    return y


# Section 4.


def mix(p: Hyper, h: Tensor, cfg: Config) -> tuple[Tensor, Tensor, Tensor]:
    """pre [C], post [C], comb [C, C] of one token's streams [C, d]."""
    c = cfg.streams
    x = h.reshape(-1)
    m = (p.fn @ x) * (x.pow(2).mean() + cfg.norm_eps) ** -0.5
    pre = torch.sigmoid(m[:c] * p.scale[0] + p.base[:c]) + cfg.hc_eps
    post = 2 * torch.sigmoid(m[c : 2 * c] * p.scale[1] + p.base[c : 2 * c])
    a = (m[2 * c :] * p.scale[2] + p.base[2 * c :]).reshape(c, c)
    return pre, post, sinkhorn(a, cfg.sinkhorn, cfg.hc_eps)


def sinkhorn(a: Tensor, iterations: int, eps: float) -> Tensor:
    comb = a.exp() / a.exp().sum(1, keepdim=True) + eps
    comb = comb / (comb.sum(0, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        comb = comb / (comb.sum(0, keepdim=True) + eps)
    return comb


def collapse(h: Tensor, pre: Tensor) -> Tensor:
    u = torch.zeros_like(h[0])
    for i in range(h.shape[0]):
        u = u + pre[i] * h[i]
    return u


def expand(y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    out = []
    for j in range(h.shape[0]):
        new = post[j] * y
        for i in range(h.shape[0]):
            new = new + comb[i, j] * h[i]
        out.append(new)
    return torch.stack(out)


def head(p: HyperHead, norm: Tensor, weight: Tensor, h: Tensor, cfg: Config) -> Tensor:
    """Logits of one token's streams."""
    x = h.reshape(-1)
    m = (p.fn @ x) * (x.pow(2).mean() + cfg.norm_eps) ** -0.5
    pre = torch.sigmoid(m * p.scale + p.base) + cfg.hc_eps
    return weight @ rms(collapse(h, pre), norm, cfg.norm_eps)


# Section 6.


def entries(p: Compressor, x: Tensor, r: int, f: Tensor, run: Run, *, indexer: bool) -> Tensor:
    """Compressed entries of a sequence's normed inputs x [S, d]: [S // r, D]."""
    overlap = p.ape.shape[1] == 2 * p.norm.shape[0]
    width = p.norm.shape[0]
    k = x @ p.wkv.t()
    g = torch.stack([p.wgate @ x[t] + p.ape[t % r] for t in range(x.shape[0])])
    out = []
    for j in range(x.shape[0] // r):
        own = range(j * r, (j + 1) * r)
        if not overlap:
            slots = [(k[t], g[t]) for t in own]
        else:
            slots = [(k[t, width:], g[t, width:]) for t in own]
            if j > 0:
                slots += [(k[t - r, :width], g[t - r, :width]) for t in own]
        w = torch.softmax(torch.stack([gate for _, gate in slots]), dim=0)
        e = (w * torch.stack([key for key, _ in slots])).sum(0)
        e = rope(rms(e, p.norm, run.cfg.norm_eps), j * r, f)
        if run.qat:
            e = round_key(e, run) if indexer else round_kv(e, run)
        out.append(e)
    return torch.stack(out) if out else x.new_zeros(0, width)


# Sections 5, 7 and 8.


def selected(p: Attention, x: Tensor, qr: Tensor, keys: Tensor, t: int, run: Run) -> list[int]:
    """Entries that the query at t keeps. Section 7."""
    cfg, index = run.cfg, p.indexer
    assert index is not None
    visible = (t + 1) // cfg.csa_rate
    iq = (index.wq_b @ qr).reshape(cfg.index_heads, cfg.index_dim)
    iq = rope(iq, t, run.scaled)
    if run.qat:
        iq = torch.stack([round_key(q, run) for q in iq])
    w = (index.weights_proj @ x) * (cfg.index_dim**-0.5 * cfg.index_heads**-0.5)
    scores = (w[:, None] * torch.relu(iq @ keys[:visible].t())).sum(0)
    run.notes.chose(scores, cfg.index_topk)
    return scores.argsort(descending=True, stable=True)[: cfg.index_topk].tolist()


def attention(p: Attention, x: Tensor, kind: Kind, run: Run) -> Tensor:
    """Attention sublayer over a whole sequence of normed inputs [S, d]."""
    cfg = run.cfg
    s, eps, width = x.shape[0], cfg.norm_eps, cfg.head_dim
    f = run.plain if kind is Kind.WINDOW else run.scaled
    qr = rms(x @ p.wq_a.t(), p.q_norm, eps)
    kv = rms(x @ p.wkv.t(), p.kv_norm, eps)
    kv = torch.stack([rope(kv[t], t, f) for t in range(s)])
    if run.qat:
        kv = torch.stack([round_kv(row, run) for row in kv])
    r = {Kind.WINDOW: 0, Kind.CSA: cfg.csa_rate, Kind.HCA: cfg.hca_rate}[kind]
    far = x.new_zeros(0, width)
    keys = far
    if p.compressor is not None:
        far = entries(p.compressor, x, r, f, run, indexer=False)
    if p.indexer is not None:
        keys = entries(p.indexer.compressor, x, r, f, run, indexer=True)
    out = []
    for t in range(s):
        q = rms((p.wq_b @ qr[t]).reshape(cfg.heads, width), None, eps)
        q = rope(q, t, f)
        seen = [kv[j] for j in range(max(0, t - cfg.window + 1), t + 1)]
        if kind is Kind.HCA:
            seen += [far[j] for j in range((t + 1) // r)]
        if kind is Kind.CSA:
            seen += [far[j] for j in selected(p, x[t], qr[t], keys, t, run)]
        rows = torch.stack(seen)
        o = []
        for h in range(cfg.heads):
            e = torch.exp(rows @ q[h] * width**-0.5)
            o.append((e / (e.sum() + torch.exp(p.attn_sink[h]))) @ rows)
        o = rope(torch.stack(o), t, f, back=True)
        groups = o.reshape(cfg.o_groups, -1)
        z = torch.cat([p.wo_a[g] @ groups[g] for g in range(cfg.o_groups)])
        out.append(p.wo_b @ z)
    return torch.stack(out)


# Section 9.


def expert(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float, weight: float) -> Tensor:
    g, u = w1 @ x, w3 @ x
    g = torch.minimum(g, torch.full_like(g, limit))
    u = u.clamp(-limit, limit)
    return w2 @ (weight * (g * torch.sigmoid(g)) * u)


def scores(logits: Tensor) -> Tensor:
    """sqrt(softplus(z)) in plain terms; float64 reaches |z| = 700."""
    return torch.sqrt(torch.where(logits > 0, logits, 0) + torch.log1p(torch.exp(-logits.abs())))


def chosen(p: Moe, s: Tensor, token: int, run: Run) -> list[int]:
    if p.tid2eid is not None:
        return p.tid2eid[token].tolist()
    assert p.bias is not None
    run.notes.chose(s + p.bias, run.cfg.topk)
    return (s + p.bias).argsort(descending=True, stable=True)[: run.cfg.topk].tolist()


def moe(p: Moe, x: Tensor, token: int, run: Run) -> Tensor:
    """One token's MoE output."""
    cfg = run.cfg
    s = scores(p.gate @ x)
    picked = chosen(p, s, token, run)
    total = sum(float(s[i]) for i in picked)
    y = shared(p.shared, x, cfg.swiglu_limit)
    for i in picked:
        weight = float(s[i]) / total * cfg.route_scale
        y = y + expert(x, p.w1[i], p.w3[i], p.w2[i], cfg.swiglu_limit, weight)
    return y


def shared(p: Mlp, x: Tensor, limit: float) -> Tensor:
    return expert(x, p.w1, p.w3, p.w2, limit, 1.0)


# Sections 10.1 and 11.


def block(p: Layer, h: Tensor, tokens: list[int], kind: Kind, run: Run) -> Tensor:
    """Streams [S, C, d] after one block."""
    cfg, s = run.cfg, range(h.shape[0])
    mixed = [mix(p.hc_attn, h[t], cfg) for t in s]
    u = torch.stack([collapse(h[t], mixed[t][0]) for t in s])
    y = attention(p.attn, rms(u, p.attn_norm, cfg.norm_eps), kind, run)
    h = torch.stack([expand(y[t], h[t], mixed[t][1], mixed[t][2]) for t in s])
    mixed = [mix(p.hc_ffn, h[t], cfg) for t in s]
    u = torch.stack([collapse(h[t], mixed[t][0]) for t in s])
    x = rms(u, p.ffn_norm, cfg.norm_eps)
    y = torch.stack([moe(p.ffn, x[t], tokens[t], run) for t in s])
    return torch.stack([expand(y[t], h[t], mixed[t][1], mixed[t][2]) for t in s])


def forward(params: Params, tokens: list[int], run: Run) -> tuple[Tensor, Tensor]:
    """Logits [S, V] and streams before the final collapse [S, C, d]."""
    cfg = run.cfg
    h = torch.stack([params.embed[i].expand(cfg.streams, -1) for i in tokens])
    for p, kind in zip(params.layers, cfg.kinds, strict=True):
        h = block(p, h, tokens, kind, run)
    rows = [head(params.hc_head, params.norm, params.head, h_t, cfg) for h_t in h]
    return torch.stack(rows), h


def draft(params: Params, h: Tensor, following: list[int], run: Run) -> tuple[Tensor, Tensor]:
    """Section 11 at positions 0 .. S-1: streams h_p [S, C, d] with the tokens at p + 1.

    Returns logits that predict the token at p + 2, and the module's own streams.
    """
    p, cfg = params.mtp, run.cfg
    assert p is not None
    x = []
    for h_p, token in zip(h, following, strict=True):
        e = rms(params.embed[token], p.enorm, cfg.norm_eps)
        x.append(
            torch.stack([p.e_proj @ e + p.h_proj @ rms(c, p.hnorm, cfg.norm_eps) for c in h_p])
        )
    out = block(p.block, torch.stack(x), following, Kind.WINDOW, run)
    rows = [head(p.hc_head, p.norm, params.head, h_p, cfg) for h_p in out]
    return torch.stack(rows), out
