"""Measure how often a new model's replies agree with the old model's, compared with the old model's own noise floor.

For each prompt, the agreement of two models is the mean over all pairs of replies, one of each model. The noise floor
is the mean over all pairs of the old model's own replies. All intervals are over prompts, because several replies to
one prompt are not independent.

`spard move-in compare` finds the new models, asks them the same prompts, and writes the report.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from typing import Any

from app.move_in.api import Api
from app.move_in.filing import JobFiler
from app.move_in.ledger import Ledger, MoveInFailed, Record, write_whole
from app.move_in.replies import NEW, Plan, Prompt, SameJudge, ask_plan, asks, cost, missing, model_jobs, reply_text
from spard.evaluation.statistics import Interval, over_seeds, rule_of_three, wilson

_WORD = re.compile(r"\w+|[^\w\s]")
_JUDGED = 6  # judge requests for a prompt at most: three pairs, each in both orders

# Measures of similarity between two replies, by their words.


def is_exact(first: str, second: str) -> bool:
    """Return True if two replies are equal, ignoring white space at their ends."""
    return first.strip() == second.strip()


def similarity(first: str, second: str) -> float:
    """Return the ROUGE-L F1 score of two texts (Lin, 2004): 2 L / (m + n), from 0 to 1.

    L is the length of the longest common subsequence of their m and n words. Words are compared in lower case, and
    punctuation marks count as words. Two empty texts have the score 1.
    """
    words, others = (_WORD.findall(text.lower()) for text in (first, second))
    if not words and not others:
        return 1.0
    return 2 * _common(words, others) / (len(words) + len(others))


def _common(words: list[str], others: list[str]) -> int:
    """Return the length of the longest common subsequence, by bit-parallel dynamic programming (Hyyro, 2004).

    Bit i of `row` is 0 if the subsequence gets longer at word i.
    """
    places: dict[str, int] = {}
    for i, word in enumerate(words):
        places[word] = places.get(word, 0) | 1 << i
    full = (1 << len(words)) - 1
    row = full
    for word in others:
        matches = row & places.get(word, 0)
        row = (row + matches | row - matches) & full
    return len(words) - row.bit_count()


Measure = Callable[[str, str], float]

MEASURES: dict[str, Measure] = {"exact": is_exact, "similarity": similarity}


@dataclass(frozen=True, slots=True)
class Replies:
    """Both models' replies to a prompt, in order; `cut` has the numbers of old and new replies at the token limit."""

    prompt_id: str
    prompt: Prompt
    old: list[str]
    new: list[str]
    cut: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreement of two models by one measure, each value with its 95 % interval.

    new_old     the new model's replies against the old one's
    old_old     the old model's replies against each other: the noise floor
    new_new     the new model's replies against each other
    difference  new_old minus old_old, over the prompts that have both
    unscored    prompts without new_old

    A value is None if there are too few replies, as old_old with one reply to each prompt.
    """

    prompts: int
    unscored: int
    new_old: Interval | None
    old_old: Interval | None
    new_new: Interval | None
    difference: Interval | None

    @property
    def is_below_floor(self) -> bool:
        """Return True if the interval of `difference` is below 0: agreement is significantly below the noise floor."""
        return self.difference is not None and self.difference.high < 0


@dataclass(frozen=True, slots=True)
class PromptScores:
    """One prompt's scores by one measure; None if there are too few replies, or the judge gave no verdict."""

    new_old: float | None
    old_old: float | None
    new_new: float | None


def score(replies: Replies, measure: Measure) -> PromptScores:
    """Return a prompt's scores: the means of a measure over all pairs of replies."""
    return PromptScores(
        _mean(measure(a, b) for a, b in product(replies.new, replies.old)),
        _mean(measure(a, b) for a, b in combinations(replies.old, 2)),
        _mean(measure(a, b) for a, b in combinations(replies.new, 2)),
    )


def judge_pairs(replies: Replies, judge: SameJudge) -> PromptScores:
    """Return a prompt's scores by a judge on the first new-old, old-old and new-new pair; each takes two requests."""

    def says(pair: list[str]) -> float | None:
        said = judge.says_same(replies.prompt, *pair) if len(pair) == 2 else None
        return None if said is None else float(said)

    return PromptScores(says([*replies.old[:1], *replies.new[:1]]), says(replies.old[:2]), says(replies.new[:2]))


def agreement(scores: Sequence[PromptScores]) -> Agreement:
    """Return the agreement over all prompts by one measure, with 95 % intervals."""
    differences = [
        each.new_old - each.old_old for each in scores if each.new_old is not None and each.old_old is not None
    ]
    return Agreement(
        prompts=len(scores),
        unscored=sum(each.new_old is None for each in scores),
        new_old=_share([each.new_old for each in scores]),
        old_old=_share([each.old_old for each in scores]),
        new_new=_share([each.new_new for each in scores]),
        difference=_difference(differences),
    )


def _share(values: Sequence[float | None]) -> Interval | None:
    """Return the mean of values in [0, 1] with Wilson's interval.

    The variance of such values is at most that of 0/1 values with the same mean, so the interval is wide enough.
    """
    known = [each for each in values if each is not None]
    return Interval(fmean(known), *wilson(sum(known), len(known))) if known else None


def _difference(values: Sequence[float]) -> Interval | None:
    """Return the mean of values in [-1, 1] with Student's t interval, or the rule of three's if all are equal."""
    if not values:
        return None
    found = over_seeds(values)
    low, high = found.low, found.high
    # Equal values have no variance, so Student's interval has no width, however few values there are.
    if min(values) == max(values):
        least = rule_of_three(len(values))
        low, high = min(low, found.value - least), max(high, found.value + least)
    return Interval(found.value, max(low, -1.0), min(high, 1.0))


def _mean(values: Iterable[float]) -> float | None:
    found = [*values]
    return fmean(found) if found else None


# Compare an old and a new model by their replies in the ledger.


@dataclass(frozen=True, slots=True)
class ModelComparison:
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
    scores: dict[str, list[PromptScores]]
    measures: dict[str, Agreement]
    unanswered: dict[str, int]

    def changed_replies(self) -> list[tuple[Replies, PromptScores]]:
        """Return the prompts with changed replies, the largest loss of similarity below the noise floor first."""
        pairs = zip(self.replies, self.scores["similarity"], strict=True)
        known = [(replies, found) for replies, found in pairs if found.new_old is not None and found.new_old < 1]
        return sorted(known, key=lambda each: _loss(each[1]), reverse=True)


def compare(ledger: Ledger, old: str, new: str, judge: SameJudge | None = None) -> ModelComparison:
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
    return ModelComparison(old, new, plan, replies, scores, measures, unanswered)


def as_json(found: ModelComparison) -> Record:
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


def _loss(found: PromptScores) -> float:
    floor = 1.0 if found.old_old is None else found.old_old
    return floor - (found.new_old or 0.0)


def pairs(api: Api, ledger: Ledger, given: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return old model -> new model for models with golden replies, and old model -> reason for the rest.

    `given` maps old to new models and replaces the search for filed jobs. Raises `MoveInFailed` without golden replies.
    """
    plans = ledger.all("plan")
    if unknown := [old for old in given if old not in plans]:
        raise MoveInFailed(f"There are no golden replies of {unknown[0]}; keep them with `spard move-in golden`.")
    if not plans:
        raise MoveInFailed("There are no golden replies; keep them with `spard move-in golden`.")
    jobs, found, left = model_jobs(ledger), dict(given), {}
    for old in () if given else plans:
        job = jobs.get(old)
        filed = ledger.get("filing", job["id"]) if job else None
        if job is None or filed is None or "job" not in filed:
            left[old] = f"no job here was filed for it; name its new model with --pair {old}=NEW"
            continue
        here = JobFiler(api, ledger, {}, (), lambda line: None).refresh(job["id"])["job"]
        if here["status"] == "succeeded" and here.get("fine_tuned_model"):
            found[old] = here["fine_tuned_model"]
        else:
            why = (here.get("error") or {}).get("message") or ""
            left[old] = " ".join(f"{here['id']} here is {here['status']}; {why}".rstrip("; ").split())
    return found, left


def ask(
    api: Api, ledger: Ledger, old: str, new: str, *, at_once: int, again: bool, tell: Callable[[str], None]
) -> bool:
    """Ask a new model the prompts of the old one's plan; return True if all are answered."""
    return ask_plan(api, ledger, NEW, new, ledger.get("plan", old), at_once=at_once, again=again, tell=tell)


def estimate(ledger: Ledger, found: Mapping[str, str], *, again: bool, with_judge: bool) -> Iterator[str]:
    """Yield a line for each pair of models with the cost of comparing them."""
    for old, new in found.items():
        plan = ledger.get("plan", old)
        prompts = {key: ledger.get("prompt", key) for key in plan["prompts"]}
        judged = f"; the judge at most {_JUDGED * len(prompts)} requests" if with_judge else ""
        yield f"{old} -> {new}: {cost(missing(ledger, NEW, new, plan, again=again), prompts)}{judged}"


def report(ledger: Ledger, found: Mapping[str, str], judge: SameJudge | None, show: int) -> Iterator[str]:
    """Compare all pairs, write the report, and yield each pair's result in a sentence and the report's paths."""
    if not found:
        return
    compared = [compare(ledger, old, new, judge) for old, new in found.items()]
    for each in compared:
        yield f"{each.old} -> {each.new}: {answer(each)}"
    for path in write(ledger.folder, compared, show):
        yield f"wrote {path}"


# Write a comparison as Markdown: the result in a sentence, the table, then the prompts that changed most.

REPORT = "comparison"

_NAMES = {"exact": "exactly the same", "similarity": "similarity of words (ROUGE-L)", "judge": "the same, by the judge"}

_SHOWN = 2000  # shown characters of a text


def write(folder: Path, found: list[ModelComparison], show: int) -> list[Path]:
    """Write comparisons into a folder as JSON and as Markdown, atomically, and return both paths."""
    written = [folder / f"{REPORT}.json", folder / f"{REPORT}.md"]
    write_whole(written[0], [json.dumps([as_json(each) for each in found], indent=2, ensure_ascii=False), "\n"])
    write_whole(written[1], page(found, show))
    return written


def page(found: list[ModelComparison], show: int) -> list[str]:
    """Return the parts of the Markdown page, with up to `show` changed prompts for each pair of models."""
    lines = ["# Old model and new model on the same prompts\n"]
    for each in found:
        lines += _section(each, show)
    return lines


def _section(found: ModelComparison, show: int) -> Iterator[str]:
    yield f"\n## `{found.old}` -> `{found.new}`\n\n"
    yield f"{answer(found)}\n\n"
    settings = ", ".join(f"{name} {value}" for name, value in found.plan["sampling"].items()) or "the models' defaults"
    asked = f"{len(found.plan['prompts'])} prompts from {found.plan['source']}, {found.plan['replies']} replies each"
    yield f"Asked: {asked}; sampling: {settings}.\n\n"
    yield "| measure | new and old | old and itself | new and itself | difference |\n|---|---|---|---|---|\n"
    for name, measure in found.measures.items():
        cells = (_percent_text(each) for each in (measure.new_old, measure.old_old, measure.new_new))
        yield f"| {_NAMES[name]} | {' | '.join(cells)} | {_percent_text(measure.difference, sign='+')} |\n"
    yield "\nIn brackets: 95 % intervals over prompts. Difference: new and old, less old and itself.\n"
    yield from _remarks(found)
    changed = found.changed_replies()
    yield f"\n### What changed: {len(changed)} of {len(found.replies)} prompts, the most first\n"
    for replies, scores in changed[:show]:
        yield f"\n#### {replies.prompt['source']}: similarity {_share_text(scores.new_old)}"
        yield f" (old and itself: {_share_text(scores.old_old)})\n\n"
        yield from _side_by_side(replies)


def answer(found: ModelComparison) -> str:
    """Return the result of a comparison in one to three sentences."""
    exact = found.measures["exact"]
    if exact.new_old is None:
        return "Nothing can be compared: no prompt has a reply of both models."
    said = f"The new model says exactly what the old one said in {_percent_text(exact.new_old)} of pairs of replies."
    if exact.difference is None:
        return f"{said} With one reply to each prompt the old model's own noise is not known; ask with `--replies 3`."
    floor = f"The old one repeats itself in {_percent_text(exact.old_old)}."
    below = [_NAMES[name] for name, each in found.measures.items() if each.is_below_floor]
    if below:
        return f"{said} {floor} They differ beyond the old model's own noise, by: {', '.join(below)}."
    return f"{said} {floor} On these prompts no difference beyond the old model's own noise can be told."


def _remarks(found: ModelComparison) -> Iterator[str]:
    """Yield remarks on missing, cut and unjudged replies, without which the results mislead."""
    for kind, name in (("golden", "old"), ("new", "new")):
        if missing := found.unanswered[kind]:
            yield f"\n{missing} replies of the {name} model are missing: refused, or not asked yet.\n"
    cut = [sum(each.cut[side] for each in found.replies) for side in (0, 1)]
    if any(cut):
        yield f"\nCut off by the limit of tokens: {cut[0]} replies of the old model, {cut[1]} of the new one.\n"
    judge = found.measures.get("judge")
    if judge and judge.unscored:
        yield f"\nThe judge gave no verdict on {judge.unscored} prompts.\n"


def _side_by_side(replies: Replies) -> Iterator[str]:
    yield _fence("asked", _last(replies))
    yield _fence("old", replies.old[0])
    yield _fence("new", replies.new[0])


def _last(replies: Replies) -> str:
    content = replies.prompt["messages"][-1].get("content")
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _fence(title: str, text: str) -> str:
    """Return a text in a code block whose fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} [...]"
    return f"{title}:\n\n{fence}text\n{shown}\n{fence}\n\n"


def _percent_text(found: Interval | None, sign: str = "") -> str:
    if found is None:
        return "not known"
    value, low, high = (f"{100 * each:{sign}.1f}" for each in (found.value, found.low, found.high))
    return f"{value} % [{low}, {high}]"


def _share_text(value: float | None) -> str:
    return "not known" if value is None else f"{value:.2f}"
