"""The parameter tree: what a model's tensors are called and how they nest. Spec section 2.

Field names are the official checkpoint's short names; weights keep its [out, in] orientation.
Letters are those of the package docstring. "wide" is float32 (float64 in a float64 model),
everything else is the model dtype. `table.py` declares every tensor.
"""

from torch import Tensor

from dsv4.tree import node


@node
class Hyper:
    """Hyper-connection of one sublayer; always wide."""

    fn: Tensor  # [(2 + M) * M, M * D]
    base: Tensor  # [(2 + M) * M]
    scale: Tensor  # [3]


@node
class HyperHead:
    """Final collapse of the streams; always wide."""

    fn: Tensor  # [M, M * D]
    base: Tensor  # [M]
    scale: Tensor  # [1]


@node
class Compressor:
    """Entries of r tokens each; c = 2 with overlap (CSA), else 1. Width C, or J in the indexer."""

    ape: Tensor  # [r, c * C], wide
    wkv: Tensor  # [c * C, D], wide
    wgate: Tensor  # [c * C, D], wide
    norm: Tensor  # [C]


@node
class Indexer:
    """Lightning indexer of a CSA layer."""

    wq_b: Tensor  # [I * J, R]
    weights_proj: Tensor  # [I, D]
    compressor: Compressor  # width J


@node
class Attention:
    """Shared-KV attention of one layer."""

    wq_a: Tensor  # [R, D]
    q_norm: Tensor  # [R]
    wq_b: Tensor  # [H * C, R]
    wkv: Tensor  # [C, D]
    kv_norm: Tensor  # [C]
    wo_a: Tensor  # [G, O, H * C / G]
    wo_b: Tensor  # [D, G * O]
    attn_sink: Tensor  # [H], wide
    compressor: Compressor | None
    indexer: Indexer | None


@node
class Mlp:
    """Shared expert."""

    w1: Tensor  # [F, D]
    w3: Tensor  # [F, D]
    w2: Tensor  # [D, F]


@node
class Moe:
    """Router, routed experts and the shared expert of one layer."""

    gate: Tensor  # [X, D], wide
    bias: Tensor | None  # [X], wide; top-k router only
    tid2eid: Tensor | None  # [V, K], int32; hash router only
    w1: Tensor  # [L, F, D]
    w3: Tensor  # [L, F, D]
    w2: Tensor  # [L, D, F]
    shared: Mlp


@node
class Layer:
    """One decoder block."""

    attn_norm: Tensor  # [D]
    ffn_norm: Tensor  # [D]
    hc_attn: Hyper
    hc_ffn: Hyper
    attn: Attention
    ffn: Moe


@node
class Mtp:
    """Draft module: two projections around one window-only block. Spec section 11."""

    e_proj: Tensor  # [D, D]
    h_proj: Tensor  # [D, D]
    enorm: Tensor  # [D]
    hnorm: Tensor  # [D]
    norm: Tensor  # [D]
    hc_head: HyperHead
    block: Layer


@node
class Params:
    """All parameters of a model."""

    embed: Tensor  # [V, D]
    head: Tensor  # [V, D], wide
    norm: Tensor  # [D]
    hc_head: HyperHead
    layers: tuple[Layer, ...]
    mtp: Mtp | None
