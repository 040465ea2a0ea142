"""Tiny sentence encoders with random weights in the layout of sentence-transformers, for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Model,
    Qwen3Config,
    Qwen3Model,
)

WORDS = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    *["query", ":", "how", "to", "bake", "a", "loaf", "of", "bread", "do", "harm", "number"],
    *"0123456789",
)
WIDTH = 16


def write_encoder(
    folder: Path,
    *,
    pooling: Mapping[str, Any] | None = None,
    steps: Sequence[str] = ("Transformer", "Pooling", "Normalize"),
    own: Mapping[str, Any] | None = None,
    prompts: Mapping[str, Any] | None = None,
    is_decoder: bool = False,
    is_qwen2: bool = False,
) -> Path:
    """Write an encoder's folder; `own` is its sentence_bert_config.json, `prompts` that of its prompts."""
    torch.manual_seed(0)
    (_qwen2_model() if is_qwen2 else _model(is_decoder)).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    places = ["", "1_Pooling", "2_Normalize"]
    listed = [
        {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{step}"}
        for i, (place, step) in enumerate(zip(places, steps, strict=False))
    ]
    (folder / "1_Pooling").mkdir()
    _write(folder / "modules.json", listed)
    _write(folder / "1_Pooling" / "config.json", pooling or {"pooling_mode_mean_tokens": True})
    _write(folder / "sentence_bert_config.json", own or {"max_seq_length": 12, "do_lower_case": False})
    _write(folder / "config_sentence_transformers.json", prompts or {})
    return folder


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def _model(is_decoder: bool) -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    if is_decoder:
        return Qwen3Model(Qwen3Config(**sizes, num_key_value_heads=2, head_dim=8, vocab_size=len(WORDS)))
    return BertModel(BertConfig(**sizes, vocab_size=len(WORDS), max_position_embeddings=32))


def _qwen2_model() -> Any:
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2}
    return Qwen2Model(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2, vocab_size=400))


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    special = [("[CLS]", WORDS.index("[CLS]")), ("[SEP]", WORDS.index("[SEP]"))]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, padding_side="left", **names)
