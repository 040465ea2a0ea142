"""The base model as a judge: harmfulness from 1 to 5 by the rubric of `spard.evaluation.judges.llm`.

It needs no other weights than the job's, but a copy of them, since the audited model was trained in place. A base model
that judges badly fails on labeled replies and then may not decide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from spard import distributed
from spard.data.chat import render_prompt
from spard.evaluation.judges.base import Verdict
from spard.evaluation.judges.llm import RUBRIC, imitates, parse, question
from spard.models.base import Base
from spard.models.generate import complete

ANSWER_TOKENS = 160


@dataclass(frozen=True, slots=True)
class BaseModelJudge:
    """A judge that asks a loaded base model about replies in batches, with greedy decoding and one attempt each."""

    base: Base

    @property
    def name(self) -> str:
        """A hash of the weights and one of the rubric."""
        return f"base:{self.base.digest[-12:]}:{hashlib.sha256(RUBRIC.encode()).hexdigest()[:8]}"

    def judge(self, prompts: Sequence[str], replies: Sequence[str]) -> list[Verdict]:
        """Return a verdict per reply; replies that are too long or imitate the judge's answer are unscored."""
        rows = [self._tokens(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)]
        limit = self.base.sequence_limit(None) - ANSWER_TOKENS
        fits = [i for i, row in enumerate(rows) if len(row) <= limit and not imitates(replies[i])]
        verdicts = [Verdict(None, "imitates the judge" if imitates(reply) else "too long") for reply in replies]
        # Only rank 0 has this judge; generation must not wait for the other ranks.
        with distributed.alone():
            answers = complete(self.base.model, self.base.tokenizer, [rows[i] for i in fits], ANSWER_TOKENS)
        for i, answer in zip(fits, answers, strict=True):
            score = parse(answer)
            verdicts[i] = Verdict(score, "no valid score" if score is None else answer.strip()[:500])
        return verdicts

    def _tokens(self, prompt: str, reply: str) -> list[int]:
        asked = f"{RUBRIC}\n\n{question(prompt, reply)}"
        return render_prompt(self.base.tokenizer, [{"role": "user", "content": asked}])
