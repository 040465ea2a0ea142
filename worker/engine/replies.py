"""Replies as the engine works on them: they grow by a token at each step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from app.inference.protocol import Ask, Finish, Said, Token
from spard.data.chat import get_renderer
from spard.models.base import Base
from worker.engine.grammar import Form, FormOfReply
from worker.engine.sampling import Sampler, describe_token
from worker.engine.texts import Text

_CALL_TOKENS = ("[TOOL_CALLS]", "<|python_tag|>", "<|tool_call|>")  # control tokens that begin a call, not an end


class Rules:
    """What all replies of a base model keep to: where they end, and how many tokens a conversation may have."""

    def __init__(self, base: Base) -> None:
        self._tokenizer = base.tokenizer
        self.logits = int(base.model.get_output_embeddings().weight.shape[0])
        self.positions = int(getattr(base.model.config.get_text_config(), "max_position_embeddings", 0)) or 2**31
        stated = base.model.generation_config.eos_token_id
        self._stated = set(stated) if isinstance(stated, list) else {stated} - {None}

    def ends(self, ask: Ask) -> frozenset[int]:
        """Return the tokens that end a reply; where tools are offered, those of a call do not."""
        renderer = get_renderer(self._tokenizer)
        ends = {*self._stated, *(renderer.ends_with_tools if ask["tools"] else renderer.ends)}
        if ask["tools"]:
            added = self._tokenizer.get_added_vocab()
            ends -= {added[token] for token in _CALL_TOKENS if token in added} - self._stated
        return frozenset(ends)


@dataclass(eq=False)
class Reply:
    """One reply that is being written."""

    id: int
    index: int
    ask: Ask
    tokenizer: Any
    ends: Collection[int]
    limit: int
    form: FormOfReply | None = None
    sampler: Sampler = field(init=False)
    text: Text = field(init=False)
    written: int = 0
    finish: Finish | None = None
    _waiting: list[Token] = field(default_factory=list)

    def __post_init__(self) -> None:
        opening = "" if self.ask["messages"] is None else get_renderer(self.tokenizer).opening
        self.sampler, self.text = Sampler(self.ask, self.index), Text(self.tokenizer, self.ask["stop"], opening)

    def advance(self, logits_V: Tensor) -> tuple[int, Said | None]:
        """Choose the next token; return it with what is to be told, if anything is. Raise where logits allow none."""
        if not logits_V.amax().isfinite():
            raise ValueError("of the logits for a reply, one is no number, or none is finite")
        token = self.sampler.next(logits_V if self.form is None else self.form.mask_logits(logits_V))
        if token in self.ends:
            self.finish = "stop"
            return token, self._piece(self.text.end())
        self.sampler.note(token)
        if self.form is not None:
            self.form.note(token)
        self.written += 1
        if (count := self.ask["top_logprobs"]) is not None:
            self._waiting.append(describe_token(self.tokenizer, logits_V, token, count, as_ids=self.ask["as_ids"]))
        more = self.text.add(token)
        if self.text.is_stopped:
            self.finish = "stop"
        elif self.written >= self.limit:
            self.finish = "length"
            more += self.text.end()
        return token, self._piece(more) if more or self.finish else None

    def close(self) -> None:
        """Note that no more of it is written."""
        if self.form is not None:
            self.form.close()

    def _piece(self, text: str) -> Said:
        tokens, self._waiting = self._waiting, []
        piece: Said = {"kind": "piece", "id": self.id, "index": self.index, "text": text, "finish": self.finish}
        piece["reply_tokens"] = self.written
        return piece | {"tokens": tokens} if self.ask["top_logprobs"] is not None else piece


def make_replies(
    base: Base, number: int, ask: Ask, ids: Sequence[int], rules: Rules, form: Form | None = None
) -> list[Reply]:
    """Return the empty replies to a request, one for each of its `n`, held to a form if it has one."""
    room, asked = rules.positions - len(ids), ask["max_tokens"]
    limit = room if asked is None else min(room, asked)
    ends = rules.ends(ask)
    forms = [FormOfReply(form, i) if form else None for i in range(ask["n"])]
    return [Reply(number, i, ask, base.tokenizer, ends, limit, forms[i]) for i in range(ask["n"])]
