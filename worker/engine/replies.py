"""The state of one reply while the engine writes it, token by token."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopPLogitsWarper
from transformers.convert_slow_tokenizer import bytes_to_unicode

from app.inference.protocol import Alternative, Ask, EngineMessage, Finish, Token
from spard.data.chat import get_renderer
from spard.data.rendering import Opening
from spard.models.base import Base
from worker.engine.grammar import Form, FormOfReply

# Decode a reply's tokens incrementally: never show a part of a character, nor a stop string or what follows it.

_HALF = "\ufffd"
_BYTE_OF = {letter: byte for byte, letter in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]  # as GPT-2
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")  # a byte-fallback token, as in Llama 2's tokenizer


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return a token's bytes, which are not valid UTF-8 if the token is only a part of a character."""
    text: str = tokenizer.decode([token])
    piece: str = tokenizer.convert_ids_to_tokens(token) if _HALF in text else ""
    if byte := _FALLBACK.fullmatch(piece):
        return bytes.fromhex(byte[1])
    if piece and all(letter in _BYTE_OF for letter in piece):
        return bytes(_BYTE_OF[letter] for letter in piece)
    return text.encode(errors="replace")


class Text:
    """The text of one reply, decoded token by token.

    Characters that may begin one of the stop strings `stops` are held back until that is decided. `opening` is text
    that the model writes before an answer; a reply that begins with it is shown without it.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], opening: str = "") -> None:
        self._tokenizer, self._stops = tokenizer, [each for each in stops if each]
        self._opening = Opening(opening)
        self._ids: list[int] = []
        self._seen = 0  # number of tokens that are decoded into `_text`
        self._text, self._shown, self._followed = "", 0, 0
        self._begun = [_StopPrefix(stop) for stop in self._stops]
        self.is_stopped = False

    def add(self, token: int) -> str:
        """Add a token and return the text that can be shown now; "" after a stop string."""
        if self.is_stopped:
            return ""
        self._ids.append(token)
        before, after = self._decode()
        # An incomplete character decodes to U+FFFD: wait for the tokens that complete it.
        if after.endswith(_HALF) or not after.startswith(before):
            return ""
        self._text += self._opening.cut(after[len(before) :])
        self._seen = len(self._ids)
        return self._shown_now(is_last=False)

    def end(self) -> str:
        """Return the rest of the text of a reply that has ended."""
        if not self.is_stopped:
            before, after = self._decode()
            more = after[len(before) :] if after.startswith(before) else ""
            self._text += self._opening.cut(more, is_last=True)
        return self._shown_now(is_last=True)

    def _decode(self) -> tuple[str, str]:
        """Return the text of the last few decoded tokens, and their text together with the new tokens."""
        start = max(0, self._seen - 4)  # some decoders depend on the tokens before, for spaces for example
        return self._tokenizer.decode(self._ids[start : self._seen]), self._tokenizer.decode(self._ids[start:])

    def _shown_now(self, *, is_last: bool) -> str:
        places = [at for stop in self._stops if (at := self._text.find(stop)) >= 0]
        if places:
            self.is_stopped = True
            self._text = self._text[: min(places)]
        upto = len(self._text) if is_last or self.is_stopped else len(self._text) - self._held_back_length()
        found = self._text[self._shown : upto]
        self._shown = max(self._shown, upto)
        return found

    def _held_back_length(self) -> int:
        """Return how many characters at the end of the text could begin a stop string."""
        for letter in self._text[self._followed :]:
            for begun in self._begun:
                begun.follow(letter)
        self._followed = len(self._text)
        return max((begun.length for begun in self._begun), default=0)


class _StopPrefix:
    """The length of the longest beginning of a stop string that the text ends with, updated in amortized O(1).

    Knuth-Morris-Pratt: `_shorter[n]` is the longest proper prefix of the stop string that its first n characters end
    with.
    """

    def __init__(self, stop: str) -> None:
        self._stop, self.length, self._shorter = stop, 0, [0, 0]
        for letter in stop[1:]:
            self._shorter.append(self._longer(self._shorter[-1], letter))

    def follow(self, letter: str) -> None:
        """Update `length` with the next character of the text."""
        length = self.length if self.length < len(self._stop) else self._shorter[self.length]
        self.length = self._longer(length, letter)

    def _longer(self, length: int, letter: str) -> int:
        while length and self._stop[length] != letter:
            length = self._shorter[length]
        return length + (self._stop[length] == letter)


# Choose a reply's next token from its logits, and describe it with its alternatives.

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


_CALL_TOKENS = ("[TOOL_CALLS]", "<|python_tag|>", "<|tool_call|>")  # control tokens that begin a call, not an end


class Rules:
    """A base model's limits for all replies: the tokens that end one, its context length and its number of logits."""

    def __init__(self, base: Base) -> None:
        self._tokenizer = base.tokenizer
        self.logits = int(base.model.get_output_embeddings().weight.shape[0])
        self.positions = int(getattr(base.model.config.get_text_config(), "max_position_embeddings", 0)) or 2**31
        stated = base.model.generation_config.eos_token_id
        self._stated = set(stated) if isinstance(stated, list) else {stated} - {None}

    def ends(self, ask: Ask) -> frozenset[int]:
        """Return the token ids that end a reply; if tools are offered, tokens that begin a call are not among them."""
        renderer = get_renderer(self._tokenizer)
        ends = {*self._stated, *(renderer.ends_with_tools if ask["tools"] else renderer.ends)}
        if ask["tools"]:
            added = self._tokenizer.get_added_vocab()
            ends -= {added[token] for token in _CALL_TOKENS if token in added} - self._stated
        return frozenset(ends)


@dataclass(eq=False)
class Reply:
    """One reply that is being written.

    id, index   the request's number, and which of its `n` replies this is
    ends        the token ids that end it
    limit       the most tokens that it may have
    form        the schema that it is constrained to, if any
    written     its tokens so far
    finish      why it ended, or None
    """

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

    def advance(self, logits_V: Tensor) -> tuple[int, EngineMessage | None]:
        """Choose the next token from the logits [V]; return it with the message for the client, if there is one.

        Raises ValueError if a logit is NaN or none is finite, and `Unwritable` if the schema cannot be followed.
        """
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
        """Free the schema state of a reply that has ended."""
        if self.form is not None:
            self.form.close()

    def _piece(self, text: str) -> EngineMessage:
        tokens, self._waiting = self._waiting, []
        piece: EngineMessage = {
            "kind": "piece",
            "id": self.id,
            "index": self.index,
            "text": text,
            "finish": self.finish,
        }
        piece["reply_tokens"] = self.written
        return piece | {"tokens": tokens} if self.ask["top_logprobs"] is not None else piece


def make_replies(
    base: Base, number: int, ask: Ask, ids: Sequence[int], rules: Rules, form: Form | None = None
) -> list[Reply]:
    """Return the `n` empty replies to a request; `ids` are its prompt's tokens, and `form` its schema, if any.

    A reply may have `max_tokens` tokens, or as many as the context length leaves after the prompt.
    """
    room, asked = rules.positions - len(ids), ask["max_tokens"]
    limit = room if asked is None else min(room, asked)
    ends = rules.ends(ask)
    forms = [FormOfReply(form, i) if form else None for i in range(ask["n"])]
    return [Reply(number, i, ask, base.tokenizer, ends, limit, forms[i]) for i in range(ask["n"])]
