"""Checkpoints of transformers load in ours, and ours in transformers, tensor for tensor."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from dsv4 import table, tree
from dsv4.config import Config, Yarn, hashed, kinds_of
from dsv4.params import Params
from runtime.load import load
from runtime.save import save
from tests.checkpoints import BASE

pytestmark = pytest.mark.e2e

# transformers' own reader of fp8 guesses tiles by division: dims are multiples of 128 here.
CFG = dataclasses.replace(
    BASE,
    vocab=64,
    dim=256,
    kinds=kinds_of("wchc"),
    hash_layers=hashed(2, 4),
    index_heads=16,
    expert_dim=128,
    yarn=Yarn(factor=16.0, original=48),
    max_positions=768,
)
LEGACY = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 64,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "moe_intermediate_size": 128,
    "n_routed_experts": 3,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 2,
    "compress_ratios": [0, 4, 128, 4, 0],
    "sliding_window": 8,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 8,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 48,
    },
    "max_position_embeddings": 768,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "float32",
}
RELEASED = {
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
        "dequantize": True,
    },
}
BACKBONE = dataclasses.replace(CFG, mtp=0)
F32 = torch.float32


def draw(cfg: Config = CFG) -> Params:
    """Params in which no two tensors agree, and whose tiles and blocks differ in scale."""
    g = torch.Generator().manual_seed(0)

    def one(leaf: table.Leaf) -> Tensor:
        if leaf.role == "int32":
            return torch.randint(cfg.experts, leaf.shape, generator=g, dtype=torch.int32)
        columns = torch.exp2(torch.randint(-3, 3, leaf.shape[-1:], generator=g))
        return torch.randn(leaf.shape, generator=g) * columns

    return tree.tmap(one, table.spec(cfg))


def random_model(dtype: torch.dtype) -> DeepseekV4ForCausalLM:
    """A transformers model all of whose tensors are random, buffers that are saved included."""
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**LEGACY))
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for t in model.state_dict().values():
            if t.is_floating_point():
                t.copy_(torch.randn(t.shape, generator=g))
            else:
                t.copy_(torch.randint(CFG.experts, t.shape, generator=g))
    return model.bfloat16() if dtype is torch.bfloat16 else model.float()


def differing(params: Params, state: dict[str, Tensor]) -> list[str]:
    """Paths of the backbone whose values are not those of a transformers state, in our dtype."""
    given, wrong = tree.paths(params), []
    for path, leaf in tree.paths(table.spec(BACKBONE)).items():
        theirs = state[leaf.hf]
        theirs = theirs if leaf.hf_rows is None else theirs[:, slice(*leaf.hf_rows)]
        ours = given[path]
        if not torch.equal(theirs.reshape(ours.shape).to(ours.dtype), ours):
            wrong.append(path)
    return wrong


@pytest.mark.parametrize("original", [True, False], ids=["official names", "its own names"])
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shard", ["5GB", "500KB"], ids=["one file", "sharded"])
def test_what_transformers_saves_loads_in_ours(
    tmp_path: Path, original: bool, dtype: torch.dtype, shard: str
) -> None:
    model = random_model(dtype)
    model.save_pretrained(tmp_path, save_original_format=original, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard != "5GB")
    params, report = load(tmp_path, BACKBONE, dtype)
    assert differing(params, model.state_dict()) == []
    assert report.faults() == {}
    # It writes official names, but its own for the embedding and the final collapse.
    assert report.family == ("mixed" if original else "transformers")
    with_drafts, _ = load(tmp_path, CFG, dtype, drafts=False)
    assert differing(with_drafts, model.state_dict()) == []


def from_transformers(folder: Path, config: dict) -> dict[str, Tensor]:
    """Its state after loading `folder`, which must leave no key over and miss none."""
    (folder / "config.json").write_text(json.dumps(config))
    loaded: Any = DeepseekV4ForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=F32)
    model, told = loaded
    assert not any(told.values()), told
    return model.state_dict()


@pytest.mark.parametrize("family", ["official", "transformers"])
@pytest.mark.parametrize("shard_bytes", [10**9, 500_000], ids=["one file", "sharded"])
def test_what_we_save_loads_in_transformers(tmp_path: Path, family: str, shard_bytes: int) -> None:
    params = draw()
    save(params, CFG, tmp_path, family=family, shard_bytes=shard_bytes)
    assert differing(params, from_transformers(tmp_path, LEGACY)) == []


def test_released_formats_load_alike_in_both(tmp_path: Path) -> None:
    """fp8 and fp4 decoded by transformers' code; it needs `accelerate` for that."""
    save(draw(), CFG, tmp_path, quantise=True)
    state = from_transformers(tmp_path, LEGACY | RELEASED)
    assert differing(load(tmp_path, CFG, F32)[0], state) == []
    assert differing(draw(), state) != [], "nothing was rounded"
