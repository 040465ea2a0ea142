"""Tiny random models of many architectures, by transformers' own configurations, with the tests' tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.spard.parts import byte_tokenizer

_TOKENS: dict[str, Any] = {"pad_token_id": 257, "bos_token_id": 256, "eos_token_id": 256}
_SIZES: dict[str, Any] = {
    "vocab_size": 262,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large enough for greedy answers that differ
} | _TOKENS
_GPT: dict[str, Any] = {
    "vocab_size": 262,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.2,
} | _TOKENS
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_DEEPSEEK: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
_LINEAR_ATTENTION: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "mamba_n_groups": 1,
}
_MPT: dict[str, Any] = {
    "vocab_size": 262,
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
    "max_seq_len": 256,
    "initializer_range": 0.2,
} | _TOKENS
_FALCON: dict[str, Any] = {name: value for name, value in _SIZES.items() if name != "head_dim"}
_OPT: dict[str, Any] = {
    "vocab_size": 262,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "word_embed_proj_dim": 32,
    "init_std": 0.2,
} | _TOKENS
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}

# What people call a model, transformers' `model_type`, and the sizes that make it tiny.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2.5": ("qwen2", _SIZES | {"tie_word_embeddings": True}),
    "Llama 3.2": ("llama", _SIZES | {"tie_word_embeddings": True}),
    "Qwen3": ("qwen3", _SIZES | {"tie_word_embeddings": True}),
    "SmolLM2": (
        "llama",
        _SIZES | {"tie_word_embeddings": True, "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3},
    ),
    "Llama 3.1": ("llama", _SIZES),
    "Mistral": ("mistral", _SIZES),
    "Ministral 3": ("ministral3", _SIZES),
    "Mixtral": ("mixtral", _SIZES | _EXPERTS),
    "Qwen3 MoE": ("qwen3_moe", _SIZES | _EXPERTS),
    "Qwen3-Next": ("qwen3_next", _SIZES | _EXPERTS | _LINEAR_ATTENTION),
    "Qwen3.5": ("qwen3_5_text", _SIZES | _LINEAR_ATTENTION),
    "Qwen3.5 MoE": ("qwen3_5_moe_text", _SIZES | _EXPERTS | _LINEAR_ATTENTION),
    "OLMo 2": ("olmo2", _SIZES),
    "OLMo 3": ("olmo3", _SIZES),
    "OLMoE": ("olmoe", _SIZES | _EXPERTS),
    "OLMo Hybrid": ("olmo_hybrid", _SIZES | _LINEAR_ATTENTION),
    "Phi-2": ("phi", _SIZES),
    "Phi-3, Phi-4": ("phi3", _SIZES),
    "Phi-3.5 MoE": ("phimoe", _SIZES | _EXPERTS),
    "Pythia (GPT-NeoX)": ("gpt_neox", _SIZES),
    "GPT-2": ("gpt2", _GPT),
    "GPT-J": ("gptj", _GPT | {"rotary_dim": 4}),
    "StarCoder (GPT-BigCode)": ("gpt_bigcode", _GPT),
    "StarCoder2": ("starcoder2", _SIZES),
    "Falcon": ("falcon", _FALCON),
    "Falcon 40B": ("falcon", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "Falcon-H1": ("falcon_h1", _SIZES | _MAMBA | {"mamba_d_ssm": 64}),
    "Falcon Mamba": ("falcon_mamba", _SIZES),
    "Mamba 2": ("mamba2", _SIZES | {"num_heads": 8, "state_size": 8, "chunk_size": 8, "n_groups": 1}),
    "DeepSeek-V2": ("deepseek_v2", _SIZES | _DEEPSEEK),
    "DeepSeek-V3": ("deepseek_v3", _SIZES | _DEEPSEEK),
    "Gemma": ("gemma", _SIZES),
    "Gemma 2": ("gemma2", _SIZES),
    "Gemma 3 (text)": ("gemma3_text", _SIZES),
    "Gemma 3 (with images)": (
        "gemma3",
        {"text_config": _SIZES, "vision_config": _VISION, "mm_tokens_per_image": 4, "initializer_range": 0.2},
    ),
    "SmolLM3": ("smollm3", _SIZES),
    "Granite": ("granite", _SIZES),
    "Granite MoE": ("granitemoe", _SIZES | _EXPERTS),
    "Granite 4 (hybrid)": (
        "granitemoehybrid",
        _SIZES | _EXPERTS | _MAMBA | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 24},
    ),
    "Command R": ("cohere", _SIZES),
    "Command A": ("cohere2", _SIZES),
    "gpt-oss": ("gpt_oss", _SIZES | _EXPERTS),
    "GLM-4": ("glm4", _SIZES),
    "GLM-4.5": ("glm4_moe", _SIZES | _DEEPSEEK),
    "StableLM": ("stablelm", _SIZES),
    "MPT": ("mpt", _MPT),
    "BLOOM": ("bloom", _GPT | {"hidden_size": 32}),
    "OPT": ("opt", _OPT),
    "Nemotron": ("nemotron", _SIZES),
    "Nemotron-H": (
        "nemotron_h",
        _SIZES
        | {"layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3, "mamba_num_heads": 8}
        | {"mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8},
    ),
    "EXAONE 4": ("exaone4", _SIZES),
    "Seed-OSS": ("seed_oss", _SIZES),
    "ERNIE 4.5": ("ernie4_5", _SIZES),
    "Hunyuan": ("hunyuan_v1_dense", _SIZES),
    "Apertus": ("apertus", _SIZES),
    "LFM2": ("lfm2", _SIZES | {"layer_types": ["conv", "full_attention"]}),
    "Jamba": (
        "jamba",
        _SIZES | _EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4},
    ),
    "RecurrentGemma": (
        "recurrent_gemma",
        _SIZES | {"lru_width": 32, "attention_window_size": 32, "block_types": ["recurrent", "attention"]},
    ),
    "MiniMax": ("minimax", _SIZES | _EXPERTS | {"layer_types": ["linear_attention", "full_attention"]}),
    "RWKV": (
        "rwkv",
        {"vocab_size": 262, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32}
        | {"intermediate_size": 48, "context_length": 256},
    ),
}


def make_model(name: str) -> Any:
    """Return the random model of an architecture; the same one each time."""
    kind, sizes = ARCHITECTURES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))


def write_architecture(name: str, folder: Path) -> Path:
    """Write a transformers folder with the random model of an architecture."""
    make_model(name).save_pretrained(folder)
    byte_tokenizer(ARCHITECTURES[name][0]).save_pretrained(folder)
    return folder
