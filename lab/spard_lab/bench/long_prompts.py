"""Pools with prompts of a given number of tokens, to measure the cost of their length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from spard.data.chat import render_question
from spard.data.jsonl import file_chunks, numbered_rows
from spard_lab.bench.measure import training_file
from spard_lab.bench.source import Inputs

_FILLER = " and"
_PROBE = 64  # filler words, for measuring the tokens of one


def with_prompts(inputs: Inputs, pool: str, tokenizer: Any, tokens: int, folder: Path) -> Inputs:
    """Return the inputs with a pool's prompts lengthened to about `tokens` tokens in the chat template.

    Longer prompts stay as they are. The file is written below `folder`.
    """

    def length(text: str) -> int:
        return len(render_question(tokenizer, text))

    def lengthen(text: str) -> str:
        missing = tokens - length(text)
        each = (length(text + _FILLER * _PROBE) - length(text)) / _PROBE
        return text + _FILLER * max(0, round(missing / each))

    rows = [row | {"prompt": lengthen(row["prompt"])} for _, row in numbered_rows(file_chunks(inputs.pools[pool]))]
    return replace(inputs, pools={**inputs.pools, pool: training_file(rows, folder / "pools")})
