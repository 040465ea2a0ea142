"""Choose a reply's next token from its logits, and describe it with its alternatives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from app.inference.protocol import Alternative, Ask, Token
from worker.engine.texts import token_bytes

_GREEDY = 1e-5  # a lower temperature means greedy: the logits divided by it may overflow
_LEAST = -9999.0  # the least log probability, as in OpenAI's API


class Sampler:
    """Chooses the tokens of one reply by its request's temperature, top_p, penalties and seed.

    Temperatures near 0 are greedy. With a seed, equal logits give equal tokens; `index` varies it within a request.
    """

    def __init__(self, ask: Ask, index: int) -> None:
        self._temperature = 0.0 if ask["temperature"] < _GREEDY else float(ask["temperature"])
        self._warpers = [TemperatureLogitsWarper(self._temperature)] if self._temperature not in (0.0, 1.0) else []
        self._top_p = TopPLogitsWarper(ask["top_p"]) if ask["top_p"] < 1 else None
        self._presence, self._frequency = ask["presence_penalty"], ask["frequency_penalty"]
        self._generator = torch.Generator()
        if ask["seed"] is None:
            self._generator.seed()
        else:
            self._generator.manual_seed((ask["seed"] + index) % 2**63)
        self._written: Counter[int] = Counter()

    def next(self, logits_V: Tensor) -> int:
        """Return the id of the next token, chosen from logits [V]."""
        logits_V = self._penalize(logits_V)
        if self._temperature == 0:
            return int(logits_V.argmax())
        logits_1V = logits_V.unsqueeze(0)
        ids = torch.empty((1, 0), dtype=torch.long)
        for warper in [*self._warpers, *([self._top_p] if self._top_p else [])]:
            logits_1V = warper(ids, logits_1V)
        return int(torch.multinomial(logits_1V.softmax(dim=-1), 1, generator=self._generator))

    def note(self, token: int) -> None:
        """Count a token that was written, for the penalties."""
        self._written[token] += 1

    def _penalize(self, logits_V: Tensor) -> Tensor:
        if not (self._presence or self._frequency) or not self._written:
            return logits_V
        ids = torch.tensor(list(self._written))
        counts = torch.tensor([float(self._written[int(i)]) for i in ids])
        logits_V = logits_V.clone()
        logits_V[ids] -= self._presence + self._frequency * counts
        return logits_V


def describe_token(tokenizer: Any, logits_V: Tensor, token: int, count: int, *, as_ids: bool) -> Token:
    """Return a token with its log probability and bytes, and the `count` likeliest tokens in its place.

    `as_ids` gives tokens as `token_id:N` instead of text.
    """
    logprobs_V = logits_V.log_softmax(dim=-1)

    def alternative(number: int) -> Alternative:
        text: str = f"token_id:{number}" if as_ids else tokenizer.decode([number])
        logprob = max(float(logprobs_V[number]), _LEAST)
        return {"token": text, "logprob": logprob, "bytes": list(token_bytes(tokenizer, number))}

    return {**alternative(token), "top_logprobs": [alternative(i) for i in logprobs_V.topk(count).indices.tolist()]}
