"""`config.json` read into a `Config` with the reason of every choice, and written back. Section 1.

Three spellings are read: the released one (`compress_ratios`, `rope_scaling`), that of transformers
(`layer_types`, `rope_parameters`), and that of the official inference code (`dim`, `n_layers`).
A fact given twice must agree; what is not understood is refused or listed, never guessed.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dsv4 import config_layers
from dsv4.config import Config, Kind
from dsv4.config_fields import Decision, Fields, Place, number, refuse, whole
from dsv4.config_layers import LayerRule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """A `Config` and how it came about."""

    cfg: Config
    decisions: tuple[Decision, ...]
    layer_rules: tuple[LayerRule, ...]
    ignored: tuple[tuple[str, str], ...]  # fields without effect here, each with the reason
    unread: tuple[str, ...]  # fields that this reader does not know
    notes: tuple[str, ...]


def _rows(text: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(word.split("=")) for word in text.split())


# Our field = config.json's. `Config` holds the type and the default, which is that of transformers;
# a field without a default must be in the file.
_PLAIN = _rows(
    "vocab=vocab_size dim=hidden_size heads=num_attention_heads head_dim=head_dim "
    "q_rank=q_lora_rank o_groups=o_groups o_rank=o_lora_rank experts=n_routed_experts "
    "topk=num_experts_per_tok expert_dim=moe_intermediate_size window=sliding_window "
    "index_heads=index_n_heads index_dim=index_head_dim index_topk=index_topk streams=hc_mult "
    "sinkhorn=hc_sinkhorn_iters route_scale=routed_scaling_factor swiglu_limit=swiglu_limit "
    "hc_eps=hc_eps norm_eps=rms_norm_eps max_positions=max_position_embeddings "
    "init_std=initializer_range"
)
_MAY_BE_ZERO = ("hc_eps", "norm_eps", "init_std")
_ALIASES = _rows(
    "hidden_size=dim moe_intermediate_size=moe_inter_dim=intermediate_size "
    "num_hidden_layers=n_layers num_hash_layers=n_hash_layers num_attention_heads=n_heads "
    "n_routed_experts=num_local_experts num_experts_per_tok=n_activated_experts "
    "scoring_func=score_func routed_scaling_factor=route_scale qk_rope_head_dim=rope_head_dim "
    "sliding_window=window_size num_nextn_predict_layers=n_mtp_layers rms_norm_eps=norm_eps"
)

# Fields with one value that the mathematics knows. Another value is another model.
_WRITTEN: tuple[tuple[str, Any, str], ...] = (
    ("scoring_func", "sqrtsoftplus", "the router scores with the square root of softplus"),
    ("topk_method", "noaux_tc", "experts are picked by score plus correction bias"),
    ("norm_topk_prob", True, "expert weights are normalised"),
    ("n_shared_experts", 1, "there is one shared expert"),
    ("num_key_value_heads", 1, "all heads share one key/value row"),
    ("hidden_act", "silu", "experts are SwiGLU"),
    ("attention_bias", False, "V4 has no biases"),
    ("tie_word_embeddings", False, "embedding and head are two tensors"),
)
FIXED: tuple[tuple[str, Any, str], ...] = (
    *_WRITTEN,
    ("mlp_bias", False, "V4 has no biases"),
    ("n_group", 1, "V4 has no expert groups"),
    ("topk_group", 1, "V4 has no expert groups"),
    ("first_k_dense_replace", 0, "every V4 layer is a mixture of experts"),
    ("moe_layer_freq", 1, "every V4 layer is a mixture of experts"),
)
_V41 = ("engram_layer_ids", "kv_source_layer_ids", "index_source_layer_ids")

_IGNORED = (
    ("model_type architectures auto_map", "decides the registry entry"),
    ("torch_dtype dtype", "the caller chooses the dtype"),
    ("quantization_config expert_dtype scale_fmt", "the loader reads formats from tensor headers"),
    ("transformers_version _name_or_path", "says who wrote the file"),
    ("pad_token_id", "padding is row 0 of every table, not a token"),
    ("attention_dropout router_jitter_noise router_aux_loss_coef", "training only"),
    ("use_cache output_router_logits output_attentions output_hidden_states return_dict "
     "chunk_size_feed_forward id2label label2id is_encoder_decoder problem_type",
     "a switch of transformers' own forward"),
    (" ".join(_V41), "V4.1 only, and empty here"),
)  # fmt: skip
_HARMLESS = tuple(name for names, _ in _IGNORED for name in names.split())


def _check_model(f: Fields) -> None:
    """Refuse another model, and any form of this one that the mathematics does not know."""
    kind = f.values.get("model_type")
    v41 = [n for n in _V41 if f.values.get(n) not in (None, [])]
    if v41 or kind in ("deepseek_v41", "deepseek_v41_text"):
        field = (*v41, "model_type")[0]
        refuse(f.paths[field], f.values[field], "V4.1 is planned and not built in this version")
    if kind is None:
        f.notes.append("model_type is absent; read as deepseek_v4")
    elif kind not in ("deepseek_v4", "deepseek_v4_text"):
        refuse(f.paths["model_type"], kind, "only deepseek_v4 is supported")
    for name, allowed, reason in FIXED:
        for path, value in f.get(name):
            if type(value) is not type(allowed) or value != allowed:
                refuse(path, value, f"only {allowed!r} is supported: {reason}")


def _plain(f: Fields) -> dict[str, Any]:
    """The fields that are one number each."""
    declared = {d.name: d for d in dataclasses.fields(Config)}
    required = [j for ours, j in _PLAIN if declared[ours].default is dataclasses.MISSING]
    lacking = [j for j in (*required, "num_hidden_layers") if not f.get(j) and not f.is_null(j)]
    if not f.get("compress_ratios") and not f.get("layer_types"):
        lacking.append("compress_ratios (or layer_types)")
    if not f.get("qk_rope_head_dim") and not f.get("partial_rotary_factor"):
        nested = [r for _, r in f.get("rope_parameters") if isinstance(r, Mapping) and "main" in r]
        lacking += [] if nested else ["qk_rope_head_dim (or partial_rotary_factor)"]
    if lacking:
        raise ValueError(f"config.json lacks {', '.join(lacking)}; these define the architecture")
    if f.is_null("num_hidden_layers"):
        refuse(f.paths["num_hidden_layers"], None, "it must be a whole number of at least 1")
    out = {}
    for ours, name in _PLAIN:
        if f.is_null(name):
            hint = "; sparse attention follows from the layer plan" if name == "index_topk" else ""
            refuse(f.paths[name], None, f"it must be a number, or absent{hint}")
        if declared[ours].type is int:
            places = [(p, whole(p, v)) for p, v in f.get(name)]
        else:
            places = [(p, number(p, v, ours in _MAY_BE_ZERO)) for p, v in f.get(name)]
        out[ours] = f.decide(ours, places, declared[ours].default)
    return out


def _drafts(f: Fields, stages: list[Place]) -> int:
    """Draft modules: what `compress_ratios` says, else `num_nextn_predict_layers`, else one."""
    told = [(p, whole(p, v, least=0)) for p, v in f.get("num_nextn_predict_layers")]
    dspark = [name for name in f.values if name.startswith("dspark_")]
    f.seen.update(dspark)
    if dspark:
        f.notes.append("DSpark drafts are planned; backbone only")
        return f.decide("mtp", [(f.paths[name], 0) for name in dspark], 0, "DSpark is planned")
    if stages and told and stages[0][1] != told[0][1]:
        says = f"{stages[0][0]} has {stages[0][1]} entries after the backbone"
        f.notes.append(f"{says}; {told[0][0]} = {told[0][1]} is not followed")
        told = []
    rule = "entries after the backbone" if stages else "as given"
    count = f.decide("mtp", stages + told, 1, rule)
    if count > 1:
        refuse((stages or told)[0][0], f"{count} draft stages", "0 or 1 is supported")
    return count


def _tokens(f: Fields) -> dict[str, Any]:
    """Begin and end of text. Null says that there is none."""
    bos = [(p, whole(p, v, least=0)) for p, v in f.get("bos_token_id")]
    eos = []
    for path, value in f.get("eos_token_id"):
        ids = value if isinstance(value, list | tuple) else [value]
        eos.append((path, tuple(whole(path, token, least=0) for token in ids)))
    if f.is_null("bos_token_id"):
        bos = [(f.paths["bos_token_id"], None)]
    if f.is_null("eos_token_id"):
        eos = [(f.paths["eos_token_id"], ())]
    return {"bos": f.decide("bos", bos, 0), "eos": f.decide("eos", eos, (1,))}


def read(raw: Mapping[str, Any]) -> Reading:
    """The model that a parsed config.json describes, and why. `raw` is not changed.

    Raises ValueError, naming field, value and what is allowed, for anything not understood.
    """
    f = Fields(raw, _ALIASES, _HARMLESS)
    _check_model(f)
    plain = _plain(f)
    layers = f.decide("layers", [(p, whole(p, v)) for p, v in f.get("num_hidden_layers")], None)
    csa, hca = config_layers.rate(f, Kind.CSA, 4), config_layers.rate(f, Kind.HCA, 128)
    kinds, stages = config_layers.kinds(f, layers, csa, hca)
    routers = config_layers.routers(f, layers)
    rest = {**config_layers.ropes(f, plain["head_dim"]), **_tokens(f), "mtp": _drafts(f, stages)}
    try:
        cfg = Config(
            **plain,
            **rest,
            csa_rate=csa,
            hca_rate=hca,
            kinds=tuple(d.value for d in kinds),
            hash_layers=tuple(d.value for d in routers),
        )
    except ValueError as error:
        raise ValueError(f"config.json describes a model that cannot be: {error}") from error
    ignored = [(f.paths[n], why) for names, why in _IGNORED for n in names.split() if n in f.values]
    return Reading(
        cfg=cfg,
        decisions=tuple(f.decisions),
        layer_rules=config_layers.layer_rules(cfg, kinds, routers, f.decisions),
        ignored=tuple(ignored),
        unread=f.unread(_HARMLESS),
        notes=tuple(f.notes),
    )


def write(cfg: Config) -> dict[str, Any]:
    """The config.json of a model, in the released spelling, accepted by transformers 5.24.

    `read(write(cfg)).cfg == cfg`. Plans that the released spelling cannot say take the other one.
    """
    yarn = cfg.yarn
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        **{name: getattr(cfg, ours) for ours, name in _PLAIN},
        **{name: value for name, value, _ in _WRITTEN},
        "num_hidden_layers": cfg.layers,
        **config_layers.write_plan(cfg),
        "qk_rope_head_dim": cfg.rope_dim,
        "rope_theta": cfg.rope_theta,
        "compress_rope_theta": cfg.compress_theta,
        "rope_scaling": yarn
        and {
            "type": "yarn",
            "factor": yarn.factor,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "original_max_position_embeddings": yarn.original,
        },
        "bos_token_id": cfg.bos,
        "eos_token_id": cfg.eos[0] if len(cfg.eos) == 1 else list(cfg.eos) or None,
    }
