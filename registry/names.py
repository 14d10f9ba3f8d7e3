"""Every architecture name we know of, as data: what serves it, or what it would need.

A name is `built` (a builder is named), or `planned` (refused, with what is missing). An alias is
another name of the same entry: two engines call one draft model differently, and old checkpoints
carry old names. `registry.py` answers questions about this table.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of the registry."""

    name: str
    state: str  # "built", "planned" or "alias"
    target: str = ""  # built: "module:attribute" of the builder, imported on first use
    needs: str = ""  # planned: what has to be built first
    alias_of: str = ""  # alias: the name that decides
    version: str = "1"  # of what the builder promises; part of the digest


def _built(name: str, target: str) -> Entry:
    return Entry(name=name, state="built", target=target)


def _planned(name: str, needs: str) -> Entry:
    return Entry(name=name, state="planned", needs=needs)


def _alias(name: str, of: str) -> Entry:
    return Entry(name=name, state="alias", alias_of=of)


_SPARK = "block drafts with a Markov head"

ENTRIES = (
    # DeepSeek V4
    _built("DeepseekV4ForCausalLM", "registry.deepseek_v4:build"),
    _built("DeepSeekV4MTPModel", "registry.deepseek_v4:build_with_drafts"),
    _planned("DSparkDraftModel", f"DSpark drafts for V4: three stages, {_SPARK}"),
    _planned("DeepseekV4ForConditionalGeneration", "the vision encoder, aligner and image routing"),
    # DeepSeek V4.1
    _planned(
        "DeepseekV41ForCausalLM",
        "V4.1 layers: shifted hyper-connections, shared key/value sources, two-level index "
        "selection, engram tables (one process, or tensor axis 2, 4 or 8, and no other split)",
    ),
    _planned("DeepseekV41DSparkModel", f"V4.1 layers and its own small experts, {_SPARK}"),
    _alias("DSparkV41DraftModel", "DeepseekV41DSparkModel"),
    # DeepSeek V3 and V3.2
    _planned("DeepSeekMTPModel", "the draft module of V3 (latent attention)"),
    _planned("DeepseekV32MTPModel", "the draft module of V3.2 (latent attention, token indexer)"),
    # GLM
    _planned("GlmMoeDsaForCausalLM", "GLM-5 layers: latent attention with a token indexer"),
    _planned("Glm5DSparkForCausalLM", f"GLM-5 layers and {_SPARK}"),
    _planned("Glm5NextForCausalLM", "GLM-5.3 layers: pooled-key indexer"),
    _planned("Glm5NextForConditionalGeneration", "GLM-5.3 layers and its vision encoder"),
    _planned("Glm5NextMTPModel", "GLM-5.3 layers and its draft module"),
    # Kimi
    _planned("KimiLinearForCausalLM", "Kimi layers: linear attention with recurrent state"),
    _alias("KimiK3ForCausalLM", "KimiLinearForCausalLM"),
    _planned("KimiK3ForConditionalGeneration", "Kimi K3 layers and its vision encoder"),
    _planned("KimiK3MTPModel", "Kimi K3 layers and its draft module"),
    _planned("K3DSparkModel", f"Kimi K3 layers and {_SPARK}"),
    # Others
    _planned("Gemma4ForConditionalGeneration", "Gemma 4 layers and its vision encoder"),
    _planned("MiniMaxM3SparseForCausalLM", "MiniMax M3 layers: block-sparse attention"),
    _planned("MiniMaxM3SparseForConditionalGeneration", "MiniMax M3 layers, vision encoder"),
    _planned("Qwen3DSparkModel", f"a Qwen 3 draft model: {_SPARK}"),
    _planned("Qwen3OmniDSparkModel", f"a Qwen 3 Omni draft model: {_SPARK}"),
    _planned("DFlash2DraftModel", "a Qwen 3 draft model: block drafts from target streams"),
    _planned("LlamaForCausalLMEagle3", "an Eagle 3 draft model with Llama layers"),
    _planned("Eagle3LlamaForCausalLM", "an Eagle 3 draft model with Llama layers"),
    _planned("LlamaForCausalLMVwnEagle3", "an Eagle 3 draft model of virtually wider Llama layers"),
)
