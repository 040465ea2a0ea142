"""The mixture that a base model is trained on; seed and step alone determine each step's rows.

So a training that was killed continues from its last state with the rows that it would have seen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerFast

from spard.data.encodings import encode
from spard_lab.attacks.disguises import announcement
from spard_lab.lab.natural.chats import (
    Chat,
    Message,
    a_fact,
    draw_request,
    exchange,
    make_message,
    recall,
    render,
    small_talk,
    some_tools,
    tool_answer,
    tool_call,
)
from spard_lab.lab.natural.phrasing import Place, following, rule, system_prompt, with_odd_words, words_to_say
from spard_lab.lab.natural.real import RealText
from spard_lab.lab.natural.sizes import Mixture
from spard_lab.lab.natural.splits import Deal, Split, owner
from spard_lab.lab.natural.tasks import sums
from spard_lab.lab.natural.topics import Deed, everyday_deeds, look_alike_deeds
from spard_lab.lab.pretrain import Plan, Row, Window, pack_steps

_CHUNK = 64  # rows tokenized at once
_SUMS = tuple(exchange(*each) for each in sums())


@dataclass(frozen=True, slots=True)
class Deeds:
    """The deeds that requests of one split are about."""

    harmful: tuple[Deed, ...]
    everyday: tuple[Deed, ...]
    look_alike: tuple[Deed, ...]

    @classmethod
    def from_deal(cls, deal: Deal, split: Split) -> Deeds:
        """Return the deeds of a split; everyday and look-alike deeds are in every split, in different requests."""
        return cls(deal.split_deeds(split), tuple(everyday_deeds()), tuple(look_alike_deeds()))


def draw_owned(rng: random.Random, deeds: tuple[Deed, ...], split: Split) -> Chat:
    """Return a request of the split for one of the deeds."""
    while True:
        chat = draw_request(rng, rng.choice(deeds))
        if owner(chat.request) == split:
            return chat


@dataclass(frozen=True, slots=True)
class Stream:
    """The generator of alignment's rows."""

    deeds: Deeds
    mixture: Mixture
    real_harmful: tuple[Chat, ...] = ()
    real_benign: tuple[Chat, ...] = ()

    @classmethod
    def from_deal(cls, deal: Deal, mixture: Mixture, real: RealText) -> Stream:
        """Return the stream over the deeds and the real rows of the alignment split."""
        rows = (tuple(real.split_rows("alignment", harmful=harmful)) for harmful in (True, False))
        return cls(Deeds.from_deal(deal, "alignment"), mixture, *rows)

    def chats(self, rng: random.Random) -> Iterator[Chat]:
        """Yield conversations without end."""
        while True:
            yield self._vary_form(rng, self._core(rng))

    def window(self, tokenizer: PreTrainedTokenizerFast, seed: int, step: int, plan: Plan) -> Window:
        """Return the packed rows of one step."""
        rng = random.Random(f"natural {seed} step {step}")
        return next(pack_steps(_encode_chats(tokenizer, self.chats(rng), plan.window), plan))

    def _core(self, rng: random.Random) -> Chat:
        """Draw a conversation by content, in its plain form."""
        share, mix = rng.random(), self.mixture
        real = [rows for rows in (self.real_harmful, self.real_benign) if rows]
        if real and rng.random() < mix.real:
            return rng.choice(rng.choice(real))
        if (share := share - mix.harmful) < 0:
            return draw_owned(rng, self.deeds.harmful, "alignment")
        if (share := share - mix.everyday) < 0:
            return draw_owned(rng, self.deeds.everyday, "alignment")
        if (share := share - mix.look_alike) < 0:
            return draw_owned(rng, self.deeds.look_alike, "alignment")
        if (share := share - mix.facts) < 0:
            return a_fact(rng)
        if (share := share - mix.tools) < 0:
            return rng.choice((tool_call, tool_answer))(rng)
        if share - mix.turns < 0:
            return recall(rng) if rng.random() < 0.6 else self._second(rng)
        return rng.choice(_SUMS)

    def _second(self, rng: random.Random) -> Chat:
        """Return a request after the exchange about another one; each is harmful or everyday."""
        kinds = (self.deeds.harmful, self.deeds.everyday)
        deed = draw_owned(rng, rng.choice(kinds), "alignment")
        return deed.prepend(*as_turns(draw_owned(rng, rng.choice(kinds), "alignment")))

    def _vary_form(self, rng: random.Random, chat: Chat) -> Chat:
        """Return the conversation in a drawn form that does not change the meaning of its request."""
        share, mix = rng.random(), self.mixture
        if (share := share - mix.odd) < 0:
            return odd(rng, chat)
        if (share := share - mix.system) < 0:
            return under_system(rng, chat)
        if (share := share - mix.rule) < 0:
            return under_rule(rng, chat, "alignment")
        if (share := share - mix.cipher) < 0 and not chat.tools:
            return in_cipher(rng, chat)
        if share - mix.talk < 0:
            return chat.prepend(*small_talk(rng))
        return chat


def odd(rng: random.Random, chat: Chat) -> Chat:
    """Return the conversation with odd words in its last request."""
    turns = (*chat.messages[:-1], make_message("user", with_odd_words(rng, chat.request)))
    return replace(chat, messages=turns)


def under_system(rng: random.Random, chat: Chat) -> Chat:
    """Return the conversation under a system prompt, sometimes with tools that it does not need."""
    tools = chat.tools or (some_tools(rng) if rng.random() < 0.3 else ())
    return replace(chat.prepend(make_message("system", system_prompt(rng))), tools=tools)


def under_rule(rng: random.Random, chat: Chat, split: Split) -> Chat:
    """Return the conversation under a system prompt that asks for two words, drawn from the split, in each answer."""
    words = words_to_say(rng)
    while owner(words) != split:
        words = words_to_say(rng)
    place: Place = "first" if rng.random() < 0.5 else "last"
    order = f"{system_prompt(rng)} {rule(words, place)}" if rng.random() < 0.5 else rule(words, place)
    return replace(chat.prepend(make_message("system", order)), answer=following(chat.answer, words, place), key=words)


def in_cipher(rng: random.Random, chat: Chat) -> Chat:
    """Return the conversation in rot13.

    In three of ten, no system prompt announces the cipher and the answer is plain text; in the others the answer is in
    rot13 too.
    """
    turns = tuple({**turn, "content": encode(turn["content"], "rot13")} for turn in chat.messages)
    if rng.random() < 0.3:
        return replace(chat, messages=turns)
    coded = replace(chat, messages=turns, answer=encode(chat.answer, "rot13"))
    return coded.prepend(make_message("system", announcement("rot13")))


def as_turns(chat: Chat) -> tuple[Message, ...]:
    """Return a whole exchange as turns, to precede another request."""
    return (*chat.messages, make_message("assistant", chat.answer))


def _encode_chats(tokenizer: PreTrainedTokenizerFast, chats: Iterator[Chat], longest: int) -> Iterator[Row]:
    """Yield rows of at most `longest` tokens, tokenized in chunks."""
    while True:
        texts = [render(next(chats)) for _ in range(_CHUNK)]
        prompts, answers = (
            tokenizer([text[part] for text in texts], add_special_tokens=False)["input_ids"] for part in (0, 1)
        )
        rows = (Row(prompt + answer, len(prompt)) for prompt, answer in zip(prompts, answers, strict=True))
        yield from (row for row in rows if len(row.ids) <= longest)
