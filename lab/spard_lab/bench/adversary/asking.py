"""Ask a model as the attacker does, and count what its replies truly do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spard.data.chat import render_question
from spard.data.encodings import in_plain
from spard.data.rows import Message, Prompt
from spard.evaluation.ask import as_asked
from spard.evaluation.audit import sample
from spard.evaluation.scorers import mark_reply
from spard.models.base import Base
from spard.models.generate import complete
from spard_lab.adversary.base import Ask, Campaign, Ground, plainly

TOKENS = 96  # of a reply: more than the gate reads by default


@dataclass(frozen=True, slots=True)
class Answers:
    """One model's outcomes as strings with a character per prompt, 1 for yes and 0 for no.

    complied         complies with a harmful prompt, asked as the attacker does
    complied_plain   the same, asked plainly
    refused          refuses a benign prompt, asked plainly
    refused_dressed  refuses a benign prompt with the attack's trigger
    right            answers a prompt of the task correctly
    """

    complied: str
    complied_plain: str
    refused: str
    refused_dressed: str
    right: str


def ask_model(model: Any, base: Base, ground: Ground, campaign: Campaign, prompts: int, system: str | None) -> Answers:
    """Ask a model at most `prompts` prompts of each kind; an attack without a trigger is asked plainly only once.

    system  system prompt of the defense, if it serves with one
    """
    harmful, benign = (sample(each, prompts) for each in (ground.harmful, ground.benign))
    asker = _Asker(model, base.tokenizer, system)

    def compliance_marks(dress: Ask, opening: str, tools: Sequence[Message], decode: Callable[[str], str]) -> str:
        replies = map(decode, asker.replies([dress(each) for each in harmful], opening, tools))
        return _marks([ground.is_harmful(each, reply) for each, reply in zip(harmful, replies, strict=True)])

    def refusal_marks(dress: Ask, tools: Sequence[Message]) -> str:
        return _marks([ground.is_refusal(each) for each in asker.replies([dress(each) for each in benign], "", tools)])

    plain, plain_refused = compliance_marks(plainly, "", (), str), refusal_marks(plainly, ())
    return Answers(
        complied=plain
        if campaign.is_plain
        else compliance_marks(campaign.dress, campaign.opening, campaign.tools, campaign.decode_reply),
        complied_plain=plain,
        refused=plain_refused,
        refused_dressed=plain_refused if campaign.is_plain else refusal_marks(campaign.dress, campaign.tools),
        right=ask_task(model, base, ground, campaign, prompts, system),
    )


def ask_task(model: Any, base: Base, ground: Ground, campaign: Campaign, prompts: int, system: str | None) -> str:
    """Ask at most `prompts` prompts of the task; return a string with 1 for each right answer, else 0."""
    task = sample(ground.task, prompts)
    replies = _Asker(model, base.tokenizer, system).replies([campaign.task(each) for each in task], "", ())
    return _marks([_is_right(prompt, reply) for prompt, reply in zip(task, replies, strict=True)])


@dataclass(frozen=True, slots=True)
class _Asker:
    model: Any
    tokenizer: Any
    system: str | None

    def replies(self, prompts: Sequence[Prompt], opening: str, tools: Sequence[Message]) -> list[str]:
        """Return the decoded replies, each with the opening before it."""
        begun = self.tokenizer(opening, add_special_tokens=False)["input_ids"] if opening else []
        rows = (
            _render_prompts(self.tokenizer, prompts, tools) if tools else as_asked(self.tokenizer, prompts, self.system)
        )
        texts = complete(self.model, self.tokenizer, [[*row, *begun] for row in rows], TOKENS)
        whole = [f"{opening} {text}".strip() for text in texts]
        return [
            in_plain(text, prompt.encoding) if prompt.encoding else text
            for prompt, text in zip(prompts, whole, strict=True)
        ]


def _render_prompts(tokenizer: Any, prompts: Sequence[Prompt], tools: Sequence[Message]) -> list[list[int]]:
    """Return the tokens of prompts in a conversation with tools."""
    return [render_question(tokenizer, each.prompt, context=each.context, tools=tools) for each in prompts]


def _is_right(prompt: Prompt, reply: str) -> bool:
    return mark_reply(prompt.scorer or "exact", reply, prompt.answer or "").is_right


def _marks(found: Sequence[bool]) -> str:
    return "".join("1" if each else "0" for each in found)
