"""Compare an old and a new model by their replies in the ledger."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from app.move_in.comparison import MEASURES, Agreement, Replies, Scored, agreement, judge_pairs, score
from app.move_in.judge import SameJudge
from app.move_in.ledger import Ledger, Record
from app.move_in.replies import Plan, asks, reply_text


@dataclass(frozen=True, slots=True)
class Compared:
    """The comparison of two models on the same prompts.

    replies     both models' replies, by prompt in the plan's order
    scores      measure -> scores of each prompt, in the same order
    measures    measure -> agreement over all prompts
    unanswered  "golden" and "new" -> number of missing replies
    """

    old: str
    new: str
    plan: Plan
    replies: list[Replies]
    scores: dict[str, list[Scored]]
    measures: dict[str, Agreement]
    unanswered: dict[str, int]

    def changed_replies(self) -> list[tuple[Replies, Scored]]:
        """Return the prompts with changed replies, the largest loss of similarity below the noise floor first."""
        pairs = zip(self.replies, self.scores["similarity"], strict=True)
        known = [(replies, found) for replies, found in pairs if found.new_old is not None and found.new_old < 1]
        return sorted(known, key=lambda each: _loss(each[1]), reverse=True)


def compare(ledger: Ledger, old: str, new: str, judge: SameJudge | None = None) -> Compared:
    """Compare the replies that the ledger has of two models under the old model's plan."""
    plan: Plan = ledger.get("plan", old)
    kept = {kind: _texts(ledger, kind, model, plan) for kind, model in (("golden", old), ("new", new))}
    replies = [
        Replies(
            key,
            ledger.get("prompt", key),
            old=[text for text, _ in kept["golden"][key]],
            new=[text for text, _ in kept["new"][key]],
            cut=(sum(is_cut for _, is_cut in kept["golden"][key]), sum(is_cut for _, is_cut in kept["new"][key])),
        )
        for key in plan["prompts"]
    ]
    scores = {name: [score(each, measure) for each in replies] for name, measure in MEASURES.items()}
    if judge is not None:
        scores["judge"] = [judge_pairs(each, judge) for each in replies]
    wanted = len(plan["prompts"]) * plan["replies"]
    unanswered = {kind: wanted - sum(len(texts) for texts in kept[kind].values()) for kind in kept}
    measures = {name: agreement(each) for name, each in scores.items()}
    return Compared(old, new, plan, replies, scores, measures, unanswered)


def as_json(found: Compared) -> Record:
    """Return a comparison as a JSON object: plan, agreement, and each prompt with both models' replies."""
    prompts = [
        {**asdict(each), "scores": {name: asdict(scores[place]) for name, scores in found.scores.items()}}
        for place, each in enumerate(found.replies)
    ]
    facts = {"old": found.old, "new": found.new, "plan": found.plan, "unanswered": found.unanswered}
    measures = {name: {**asdict(each), "below_floor": each.is_below_floor} for name, each in found.measures.items()}
    return {**facts, "measures": measures, "prompts": prompts}


def _texts(ledger: Ledger, kind: str, model: str, plan: Plan) -> dict[str, list[tuple[str, bool]]]:
    """Return a model's replies by prompt, each with True if the token limit cut it off."""
    known = ledger.all(kind)
    found: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for ask in asks(model, plan):
        response: Any = (known.get(ask.key()) or {}).get("response") or {}
        if (text := reply_text(response)) is not None:
            found[ask.prompt_id].append((text, response["choices"][0].get("finish_reason") == "length"))
    return found


def _loss(found: Scored) -> float:
    floor = 1.0 if found.old_old is None else found.old_old
    return floor - (found.new_old or 0.0)
