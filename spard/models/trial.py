"""A base model tried before anybody depends on it: loaded, asked in its own words, and made to say something."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from spard.data.chat import UNBOUNDED, encode_to_train, render_prompt
from spard.data.tools import CONVERSATION
from spard.errors import InvalidModel, SpardError
from spard.models.base import Base, load_base


@dataclass(frozen=True, slots=True)
class Trial:
    """What a model is that passed: its parameters, the tokens of a row at most, and the id of its end token."""

    parameters: int
    positions: int
    end_token: int
    digest: str


def try_base(source: str | Path, revision: str | None = None) -> Trial:
    """Load tokenizer and weights, render a conversation, and run it forward.

    Raise InvalidModel with what is wrong. The weights are in bfloat16, so that a large model needs no more memory than
    its files.
    """
    base = load_base(source, revision, dtype=torch.bfloat16)
    prompt, row = _conversation(base)
    _require_ids(base, row)
    with torch.inference_mode():
        logits = base.model(input_ids=torch.tensor([prompt], device=base.device)).logits
    if not bool(torch.isfinite(logits).all()):
        raise InvalidModel("its weights give logits that are not finite", "model")
    count = sum(each.numel() for each in base.model.parameters())
    return Trial(count, base.sequence_limit(None), int(base.tokenizer.eos_token_id), base.digest)


def _conversation(base: Base) -> tuple[list[int], list[int]]:
    """Return the tokens of a question, and those of a row with its answer."""
    try:
        row = encode_to_train(base.tokenizer, [CONVERSATION], UNBOUNDED)[0]
        return render_prompt(base.tokenizer, CONVERSATION.messages[:1]), list(row.ids)
    except SpardError as error:
        message = f"its chat template cannot write a question and its answer: {error.message}"
        raise InvalidModel(message, "model") from error


def _require_ids(base: Base, row: list[int]) -> None:
    """Refuse a tokenizer whose ids the weights have no embedding for."""
    known = int(base.model.get_input_embeddings().num_embeddings)
    largest = max([*row, int(base.tokenizer.eos_token_id)])
    if largest >= known:
        message = f"its tokenizer is another model's: it has a token {largest}, the weights know {known}"
        raise InvalidModel(message, "model")
