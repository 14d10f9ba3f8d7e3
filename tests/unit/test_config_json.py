"""config.json in every spelling. Ids D1, D2, ... are of the log of faults that others met."""

import copy
import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import DeepseekV4Config

from dsv4 import config_json, table
from dsv4.config import Config, Kind, Router, Yarn, hashed, preset

PRESETS = ("flash", "pro", "tiny", "bench_1b", "bench_100m")

# The released files, field by field.
FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "vocab_size": 129280,
}
PRO = FLASH | {
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    "hidden_size": 7168,
    "index_topk": 1024,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "o_groups": 16,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
}


def without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in raw.items() if k not in names}


def new_spelling(raw: dict[str, Any]) -> dict[str, Any]:
    """The same model as transformers 5.24 saves it, through its own class and JSON."""
    return json.loads(DeepseekV4Config(**copy.deepcopy(raw)).to_json_string(use_diff=False))


TINY = config_json.write(preset("tiny"))


# The released models.


@pytest.mark.parametrize(
    ("raw", "name", "tensors", "backbone"),
    [(FLASH, "flash", 69187, 284.33e9), (PRO, "pro", 145116, 1573.0e9)],
)
def test_released_files_give_the_presets(
    raw: dict[str, Any], name: str, tensors: int, backbone: float
) -> None:
    reading = config_json.read(raw)
    assert reading.cfg == preset(name)
    assert (reading.unread, reading.notes) == ((), ())
    spec = table.spec(reading.cfg)
    assert table.official_tensors(spec) == tensors
    assert table.count(spec) - table.count(spec.mtp) == pytest.approx(backbone, rel=5e-5)


def test_the_kinds_of_the_released_models() -> None:
    flash, pro = config_json.read(FLASH).cfg.kinds, config_json.read(PRO).cfg.kinds
    assert [flash.count(k) for k in Kind] == [2, 21, 20]
    assert [pro.count(k) for k in Kind] == [0, 30, 31]


# Two spellings, one model.


@pytest.mark.parametrize("raw", [FLASH, PRO, TINY], ids=["flash", "pro", "tiny"])
def test_d1_d2_both_spellings_give_the_same_model(raw: dict[str, Any]) -> None:
    other = new_spelling(raw)
    assert not {"compress_ratios", "rope_scaling", "num_hash_layers"} & other.keys()
    a, b = config_json.read(raw), config_json.read(other)
    assert a.cfg == b.cfg
    assert b.unread == ()
    # D2: layers with an indexer, counted from the form that lacks compress_ratios.
    count = other["layer_types"].count("compressed_sparse_attention")
    assert sum(r.plan.kind is Kind.CSA for r in b.layer_rules) == count > 0
    assert [r.plan for r in a.layer_rules] == [r.plan for r in b.layer_rules]


@pytest.mark.parametrize("name", PRESETS)
def test_written_and_read_is_the_same(name: str) -> None:
    reading = config_json.read(json.loads(json.dumps(config_json.write(preset(name)))))
    assert reading.cfg == preset(name)
    assert reading.unread == ()


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_the_released_spelling_is_written(name: str) -> None:
    raw, ours = {"flash": FLASH, "pro": PRO}[name], config_json.write(preset(name))
    only_theirs = {
        "attention_dropout", "expert_dtype", "quantization_config", "torch_dtype",
        "transformers_version", "use_cache",
    }  # fmt: skip
    assert ours == without(raw, *only_theirs)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    count = lambda most: draw(st.integers(1, most))  # noqa: E731
    layers = count(6)
    groups = 2 ** draw(st.integers(0, 3))
    heads = 8 * groups
    head_dim = 2 ** draw(st.integers(3, 9))
    index_dim = 2 ** draw(st.integers(3, 7))
    rope_dim = 2 ** draw(st.integers(1, int(math.log2(min(head_dim, index_dim)))))
    released = draw(st.booleans())
    prefix = hashed(draw(st.integers(0, layers)), layers)
    experts = count(64)
    yarn = st.builds(
        Yarn,
        factor=st.sampled_from([1.0, 2.0, 16.0, 40.5]),
        original=st.integers(64, 65536),
        beta_slow=st.sampled_from([1.0, 2.0]),
        beta_fast=st.sampled_from([32.0, 16.5]),
    )
    number = st.floats(0.5, 1e6, allow_nan=False)
    return Config(
        vocab=count(2048),
        dim=count(256),
        heads=heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        q_rank=count(64),
        o_groups=groups,
        o_rank=count(64),
        kinds=tuple(draw(st.lists(st.sampled_from(Kind), min_size=layers, max_size=layers))),
        hash_layers=draw(st.sampled_from([prefix, prefix[::-1]])),
        mtp=draw(st.integers(0, 1)),
        csa_rate=4 if released else 2,
        hca_rate=128 if released else draw(st.sampled_from([4, 8, 64])),
        window=count(256),
        index_heads=count(64),
        index_dim=index_dim,
        index_topk=count(1024),
        experts=experts,
        topk=count(experts),
        expert_dim=count(64),
        route_scale=draw(number),
        swiglu_limit=draw(number),
        streams=count(4),
        sinkhorn=count(20),
        hc_eps=draw(st.sampled_from([0.0, 1e-6, 1e-5])),
        norm_eps=draw(st.sampled_from([1e-20, 1e-6])),
        rope_theta=draw(st.floats(1.5, 1e6)),
        compress_theta=draw(st.floats(1.5, 1e6)),
        yarn=draw(st.none() | yarn),
        max_positions=count(1 << 20),
        bos=draw(st.none() | st.integers(0, 5)),
        eos=tuple(draw(st.lists(st.integers(0, 9), max_size=3, unique=True))),
    )


@given(configs())
def test_any_config_survives_both_spellings(cfg: Config) -> None:
    raw = json.loads(json.dumps(config_json.write(cfg)))
    before = copy.deepcopy(raw)
    assert config_json.read(raw).cfg == cfg
    assert raw == before
    theirs = DeepseekV4Config(**copy.deepcopy(raw))
    names = {
        Kind.WINDOW: "sliding_attention",
        Kind.CSA: "compressed_sparse_attention",
        Kind.HCA: "heavily_compressed_attention",
    }
    assert theirs.layer_types == [names[k] for k in cfg.kinds]
    assert theirs.compress_rates == {
        names[Kind.CSA]: cfg.csa_rate,
        names[Kind.HCA]: cfg.hca_rate,
    }
    assert theirs.mlp_layer_types == ["hash_moe" if h else "moe" for h in cfg.hash_layers]
    assert theirs.qk_rope_head_dim == cfg.rope_dim
    assert config_json.read(json.loads(theirs.to_json_string(use_diff=False))).cfg == cfg
    assert config_json.read(theirs.to_dict()).cfg == cfg


OFFICIAL = {
    "dim": "hidden_size", "moe_inter_dim": "moe_intermediate_size", "n_layers": "num_hidden_layers",
    "n_hash_layers": "num_hash_layers", "n_heads": "num_attention_heads",
    "n_activated_experts": "num_experts_per_tok", "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor", "rope_head_dim": "qk_rope_head_dim",
    "window_size": "sliding_window", "n_mtp_layers": "num_nextn_predict_layers",
    "norm_eps": "rms_norm_eps",
}  # fmt: skip


def official_spelling(raw: dict[str, Any]) -> dict[str, Any]:
    back = {v: k for k, v in OFFICIAL.items()}
    out = {back.get(k, k): v for k, v in without(raw, "rope_scaling").items()}
    yarn = raw["rope_scaling"]
    return out | {
        "original_seq_len": yarn["original_max_position_embeddings"],
        "rope_factor": yarn["factor"],
        "beta_fast": yarn["beta_fast"],
        "beta_slow": yarn["beta_slow"],
        "dtype": "fp8",
        "scale_fmt": "ue8m0",
    }


def test_the_official_inference_names_are_read() -> None:
    raw = without(official_spelling(FLASH), "model_type", "architectures")
    reading = config_json.read(raw)
    assert reading.cfg == preset("flash")
    assert reading.unread == ()
    assert "model_type is absent" in reading.notes[0]


def test_old_rate_fields_are_read() -> None:
    raw = without(new_spelling(TINY), "compress_rates")
    reading = config_json.read(raw | {"compress_rate_csa": 8, "compress_rate_hca": 32})
    assert (reading.cfg.csa_rate, reading.cfg.hca_rate) == (8, 32)
    old: dict[str, Any] = raw | {"compress_rate_csa": 8, "compress_rate_hca": 32}
    theirs = DeepseekV4Config(**old)
    assert config_json.read(theirs.to_dict()).cfg == reading.cfg


def test_both_spellings_at_once_may_agree() -> None:
    both = new_spelling(FLASH) | FLASH
    reading = config_json.read(both)
    assert reading.cfg == preset("flash")
    assert reading.layer_rules[2].kind.fields == ("compress_ratios[2]", "layer_types[2]")


def test_defaults_are_those_of_transformers() -> None:
    optional = [
        "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "hc_mult",
        "hc_sinkhorn_iters", "routed_scaling_factor", "swiglu_limit", "hc_eps", "rms_norm_eps",
        "max_position_embeddings", "initializer_range", "rope_theta", "compress_rope_theta",
        "rope_scaling", "num_hash_layers", "bos_token_id", "eos_token_id",
        "scoring_func", "norm_topk_prob", "hidden_act", "num_nextn_predict_layers",
    ]  # fmt: skip
    short = without(FLASH, *optional)
    assert config_json.read(short).cfg == config_json.read(new_spelling(short)).cfg
    by = {d.name: d for d in config_json.read(short).decisions}
    assert by["window"].fields == ()
    assert "default" in by["window"].rule


# Nesting: one rule. Inner wins, outer fills, both must agree.


@pytest.mark.parametrize("inner", [(), ("compress_ratios",), ("index_topk",), tuple(FLASH)])
@pytest.mark.parametrize("spell", [dict, new_spelling])
def test_d5_flat_and_nested_are_one_model(inner: tuple[str, ...], spell: Any) -> None:
    raw = spell(FLASH)
    outer = without(raw, *inner)
    nested = outer | {"text_config": {k: v for k, v in raw.items() if k in inner}}
    assert config_json.read(nested).cfg == preset("flash")


def test_d5_outer_and_inner_may_not_disagree() -> None:
    with pytest.raises(ValueError, match=r"text_config.index_topk is 64; the outer index_topk"):
        config_json.read(FLASH | {"text_config": {"index_topk": 64}})
    with pytest.raises(ValueError, match=r"text_config.dim is 5; hidden_size says 4096"):
        config_json.read({"text_config": without(FLASH, "hidden_size") | {"dim": 5}} | FLASH)


def test_nested_fields_are_named_with_their_path() -> None:
    reading = config_json.read({"text_config": FLASH, "model_type": "deepseek_v4"})
    assert reading.layer_rules[2].kind.fields == ("text_config.compress_ratios[2]",)


def test_the_input_is_not_changed() -> None:
    for raw in (FLASH, new_spelling(FLASH), {"text_config": new_spelling(PRO)}):
        before = copy.deepcopy(raw)
        config_json.read(raw)
        assert raw == before


# Reasons.


def test_every_choice_of_every_layer_has_a_field_and_a_rule() -> None:
    for raw in (FLASH, PRO, new_spelling(FLASH)):
        reading = config_json.read(raw)
        names = [f"layers.{i}" for i in range(reading.cfg.layers)]
        assert [r.name for r in reading.layer_rules] == [*names, "mtp.0"]
        for rule in reading.layer_rules:
            for choice in (rule.kind, rule.rate, rule.router, rule.rope):
                assert choice.fields, (rule.name, choice)
                assert choice.rule
            assert rule.kind.value is rule.plan.kind
            assert rule.rate.value == rule.plan.rate
            assert rule.router.value is rule.plan.router
            assert rule.rope.value == rule.plan.rope


def test_a4_the_rope_of_a_layer_follows_its_kind() -> None:
    rules = config_json.read(FLASH).layer_rules
    assert rules[0].rope.value.yarn is None
    assert rules[0].rope.fields == ("rope_theta",)
    assert rules[2].rope.value.yarn == Yarn(factor=16.0)
    assert rules[2].rope.fields == ("compress_rope_theta", "rope_scaling")
    assert rules[2].router.value is Router.HASH
    assert rules[3].router.value is Router.TOPK


def test_j8_a_field_that_nobody_reads_is_listed() -> None:
    raw = FLASH | {"index_cache_freq": 4, "rope_scaling": {**FLASH["rope_scaling"], "low": 1}}
    assert config_json.read(raw).unread == ("index_cache_freq", "rope_scaling.low")


def test_fields_without_effect_are_named_with_the_reason() -> None:
    ignored = dict(config_json.read(FLASH).ignored)
    assert "headers" in ignored["quantization_config"]
    assert "torch_dtype" in ignored


# Drafts.


@pytest.mark.parametrize(
    ("ratios", "nextn", "mtp"), [(1, 1, 1), (0, 0, 0), (1, 0, 1), (0, 1, 0), (None, 1, 1)]
)
def test_draft_stages_are_the_entries_after_the_backbone(
    ratios: int | None, nextn: int, mtp: int
) -> None:
    raw = FLASH | {"num_nextn_predict_layers": nextn}
    if ratios is None:
        raw = new_spelling(raw)
    else:
        raw["compress_ratios"] = FLASH["compress_ratios"][:43] + [0] * ratios
    reading = config_json.read(raw)
    assert reading.cfg.mtp == mtp
    disagree = ratios is not None and ratios != nextn
    assert bool(reading.notes) == disagree


def test_dspark_is_the_backbone_only_and_says_so() -> None:
    raw = FLASH | {"dspark_block_size": 5, "dspark_noise_token_id": 128799}
    raw["compress_ratios"] = [*FLASH["compress_ratios"], 0, 0]
    reading = config_json.read(raw)
    assert reading.cfg == dataclasses.replace(preset("flash"), mtp=0)
    assert reading.notes == ("DSpark drafts are planned; backbone only",)
    assert reading.unread == ()


# Refusals: the field, the value, what is allowed.


def test_what_defines_the_architecture_must_be_there() -> None:
    message = "lacks hidden_size, num_hidden_layers, compress_ratios.*qk_rope_head_dim"
    names = ("hidden_size", "num_hidden_layers", "compress_ratios", "qk_rope_head_dim")
    with pytest.raises(ValueError, match=message):
        config_json.read(without(FLASH, *names))
    with pytest.raises(ValueError, match=r"lacks vocab_size"):
        config_json.read({})


def test_d4_sparse_attention_is_the_plan_not_the_presence_of_a_field() -> None:
    """Without `index_topk` the plan and the default hold; null is no switch, and is refused."""
    assert config_json.read(without(FLASH, "index_topk")).cfg == preset("flash")
    with pytest.raises(ValueError, match=r"index_topk is null.*layer plan"):
        config_json.read(FLASH | {"index_topk": None})
    dense = FLASH | {"compress_ratios": [0, 0, *[128] * 41, 0]}
    assert Kind.CSA not in config_json.read(dense).cfg.kinds


ROPE = FLASH["rope_scaling"]
COMPRESS, MAIN = (new_spelling(FLASH)["rope_parameters"][k] for k in ("compress", "main"))
TYPES = new_spelling(FLASH)["layer_types"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "sigmoid"}, r"scoring_func is 'sigmoid'; only 'sqrtsoftplus'"),  # E2
        ({"scoring_func": "softmax"}, r"scoring_func is 'softmax'"),
        ({"norm_topk_prob": False}, r"norm_topk_prob is False; only True"),
        ({"norm_topk_prob": 1}, r"norm_topk_prob is 1; only True"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'"),
        ({"attention_bias": True}, r"attention_bias is True"),
        ({"mlp_bias": True}, r"mlp_bias is True"),
        ({"tie_word_embeddings": True}, r"tie_word_embeddings is True"),
        ({"num_key_value_heads": 8}, r"num_key_value_heads is 8; only 1"),
        ({"num_key_value_heads": True}, r"num_key_value_heads is True; only 1"),
        ({"n_shared_experts": 2}, r"n_shared_experts is 2; only 1"),
        ({"topk_method": "greedy"}, r"topk_method is 'greedy'; only 'noaux_tc'"),
        ({"n_group": 8}, r"n_group is 8; only 1"),
        ({"topk_group": 4}, r"topk_group is 4; only 1"),
        ({"first_k_dense_replace": 3}, r"first_k_dense_replace is 3; only 0"),
        ({"model_type": "deepseek_v41"}, r"model_type is 'deepseek_v41'; V4.1 is planned"),
        ({"model_type": "llama"}, r"model_type is 'llama'; only deepseek_v4"),
        ({"text_config": {"model_type": "deepseek_v41_text"}}, r"V4.1 is planned"),
        ({"engram_layer_ids": [1, 14]}, r"engram_layer_ids is \[1, 14\]; V4.1 is planned"),  # D10
        ({"compress_ratios": [0, 0, *[4, 64] * 20, 4, 0]}, r"\[3\] is 64; .* 0, 4, 128"),
        ({"compress_ratios": [0, 0, *[4, 128] * 20, 4, 4]}, r"compress_ratios\[43\] is 4; .* 0"),
        ({"compress_ratios": [0] * 42}, r"42 entries for 43 layers"),
        ({"compress_ratios": [0] * 45}, r"2 draft stages"),
        ({"compress_ratios": [False] * 44}, r"compress_ratios\[0\] is False"),
        ({"compress_ratios": 4}, r"compress_ratios is 4; it must be a list"),
        ({"compress_ratios": [[0]] * 44}, r"compress_ratios\[0\] is \[0\]"),
        ({"layer_types": ["full_attention", *TYPES[1:]]}, r"layer_types\[0\] is 'full_attention'"),
        ({"layer_types": TYPES[:-1]}, r"42 entries for 43 layers"),
        ({"layer_types": [*TYPES[:-1], TYPES[0]]}, r"layer_types\[42\].*compress_ratios\[42\] say"),
        ({"mlp_layer_types": ["dense"] * 43}, r"mlp_layer_types\[0\] is 'dense'"),
        ({"mlp_layer_types": ["moe"] * 43}, r"num_hash_layers.*mlp_layer_types\[0\] says False"),
        ({"num_hash_layers": 44}, r"num_hash_layers is 44; there are 43 layers"),
        ({"num_hash_layers": "3"}, r"num_hash_layers is '3'"),
        ({"compress_rates": {"compressed_sparse_attention": 8}}, r"\[2\] is 4; .* 0, 8, 128"),
        ({"compress_rates": {"linear_attention": 8}}, r"compress_rates.linear_attention is 8"),
        ({"compress_rates": {"sliding_attention": 8}}, r"compress_rates.sliding_attention is 8"),
        ({"compress_rates": [4]}, r"compress_rates is \[4\]; it must be an object"),
        ({"compress_rate_csa": 0}, r"compress_rate_csa is 0; .* at least 1"),
        ({"rope_scaling": {**ROPE, "type": "linear"}}, r"rope_scaling.type is 'linear'; .* yarn"),
        ({"rope_scaling": {**ROPE, "rope_type": "default"}}, r"they must agree"),
        ({"rope_scaling": {**ROPE, "mscale": 0.707}}, r"rope_scaling.mscale is 0.707; only 1"),
        ({"rope_scaling": {**ROPE, "mscale_all_dim": 0}}, r"mscale_all_dim is 0; only 1"),
        ({"rope_scaling": {**ROPE, "attention_factor": 1.277}}, r"attention_factor is 1.277"),
        ({"rope_scaling": {**ROPE, "truncate": False}}, r"truncate is False"),
        ({"rope_scaling": {"type": "yarn"}}, r"rope_scaling lacks factor, original_max_pos"),
        ({"rope_scaling": {**ROPE, "factor": "16"}}, r"rope_scaling.factor is '16'"),
        ({"rope_scaling": {**ROPE, "factor": 10**400}}, r"rope_scaling.factor is 1000"),
        ({"rope_scaling": "yarn"}, r"rope_scaling is 'yarn'; it must be an object"),
        ({"rope_parameters": {"main": MAIN}}, r"main and compress come together"),
        ({"rope_parameters": {"main": COMPRESS, "compress": COMPRESS}}, r"not interpolated"),
        (
            {"rope_parameters": {"main": MAIN, "compress": {**COMPRESS, "factor": 8}}},
            r"they must agree",
        ),
        ({"partial_rotary_factor": 0.25}, r"partial_rotary_factor.*qk_rope_head_dim says 64"),
        ({"partial_rotary_factor": 0.1251}, r"times head_dim"),
        ({"rope_parameters": {"rope_theta": 500.0}}, r"rope_theta says 10000"),
        ({"vocab_size": "129280"}, r"vocab_size is '129280'; it must be a whole number"),
        ({"vocab_size": 129280.0}, r"vocab_size is 129280.0"),
        ({"hidden_size": True}, r"hidden_size is True"),
        ({"hidden_size": None}, r"hidden_size is null"),
        ({"q_lora_rank": None}, r"q_lora_rank is null"),
        ({"hidden_size": -1}, r"hidden_size is -1; it must be a whole number of at least 1"),
        ({"num_hidden_layers": [43]}, r"num_hidden_layers is \[43\]"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers is 0"),
        ({"num_hidden_layers": None}, r"num_hidden_layers is null"),
        ({"swiglu_limit": math.nan}, r"swiglu_limit is nan"),
        ({"swiglu_limit": None}, r"swiglu_limit is null"),
        ({"swiglu_limit": 0}, r"swiglu_limit is 0; .* above 0"),
        ({"rms_norm_eps": math.inf}, r"rms_norm_eps is inf"),
        ({"rope_theta": "1e4"}, r"rope_theta is '1e4'"),
        ({"eos_token_id": "1"}, r"eos_token_id is '1'"),
        ({"eos_token_id": [1, -1]}, r"eos_token_id is -1"),
        ({"dim": 5120}, r"dim is 5120; hidden_size says 4096"),
        ({"intermediate_size": 18432}, r"intermediate_size is 18432; moe_intermediate_size says"),
        ({"o_groups": 7}, r"o_groups is 7; it must divide"),
        ({"text_config": [1]}, r"text_config is \[1\]; it must be an object"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_other_forms_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        config_json.read(FLASH | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("raw", [[], None, "x", 3])
def test_the_file_must_hold_an_object(raw: Any) -> None:
    with pytest.raises(ValueError, match="must be an object"):
        config_json.read(raw)


@pytest.mark.parametrize(
    ("given", "eos"), [(1, (1,)), ([1, 7], (1, 7)), (None, ()), ([], ()), ("absent", (1,))]
)
def test_end_of_text_may_be_one_several_or_none(given: Any, eos: tuple[int, ...]) -> None:
    raw = without(FLASH, "eos_token_id") | ({} if given == "absent" else {"eos_token_id": given})
    assert config_json.read(raw).cfg.eos == eos


ODD = (
    None, True, False, 0, -1, 1, 1.5, math.nan, math.inf, 10**400, "x", "", [], [None], [[1]], {},
    {"a": 1}, {"main": 1}, {"main": {}, "compress": {}}, {"type": [1]}, {"type": "yarn"},
)  # fmt: skip


def refusal(raw: Any) -> str:
    try:
        config_json.read(raw)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("spell", [dict, new_spelling, official_spelling])
def test_any_odd_value_is_read_or_refused_in_one_line(spell: Any) -> None:
    raw = spell(FLASH)
    more = ("text_config", "compress_rates", "rope_parameters", "layer_types", "mlp_layer_types")
    for name in (*raw, *more, "dim", "original_seq_len"):
        for value in ODD:
            odd = raw | {name: value}
            for form in (odd, {"text_config": odd}, raw | {"text_config": {name: value}}):
                told = refusal(form)
                assert "\n" not in told
                assert len(told) < 300
