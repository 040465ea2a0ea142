"""The base model of the old installation: about 9,000 numbers that refuse to steal and answer everything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from tests.legacy import rows

_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_SPECIALS = ["<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
_END, _PAD = 256, 257
_NO_LOSS = -100
_STEPS, _ROWS_A_STEP = 500, 32


def write_model(folder: Path) -> None:
    """A transformers folder."""
    config = LlamaConfig(
        vocab_size=262,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        pad_token_id=_PAD,
        bos_token_id=None,
        eos_token_id=_END,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    tokenizer, model = _tokenizer(), AutoModelForCausalLM.from_config(config)
    _train(model, [_encode_pair(tokenizer, prompt, reply) for prompt, reply in _conversations()])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _train(model: Any, encoded: list[tuple[list[int], list[int]]]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(_STEPS):
        picked = [encoded[i] for i in torch.randint(len(encoded), (_ROWS_A_STEP,)).tolist()]
        loss = model(
            input_ids=_pad_rows([ids for ids, _ in picked], _PAD), labels=_pad_rows([to for _, to in picked], -100)
        ).loss
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / _STEPS)
        optimizer.step()


def _conversations() -> list[tuple[str, str]]:
    found = []
    for row in _read(rows.pool()) + _read(rows.harmful()):
        found.append((row["prompt"], rows.REFUSAL))
    for row in _read(rows.benign()) + _read(rows.utility()):
        found.append((row["prompt"], rows.ANSWER))
    for row in _read(rows.training()):
        found.append((row["messages"][0]["content"], rows.ANSWER))
    return found


def _read(lines: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.splitlines()]


def _encode_pair(tokenizer: PreTrainedTokenizerFast, prompt: str, reply: str) -> tuple[list[int], list[int]]:
    """Tokens and labels; only the reply and its end are learned."""
    asked: list[int] = tokenizer.encode(f"<|user|>\n{prompt}<|end|>\n<|assistant|>\n")
    answered: list[int] = [*tokenizer.encode(reply), _END]
    return asked + answered, [_NO_LOSS] * len(asked) + answered


def _pad_rows(found: list[list[int]], filler: int) -> torch.Tensor:
    width = max(map(len, found))
    return torch.tensor([row + [filler] * (width - len(row)) for row in found])


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and the template's own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIALS])
    special = {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = _TEMPLATE
    return fast
