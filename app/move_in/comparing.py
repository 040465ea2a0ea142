"""The steps of `spard move-in compare`: find the new models, ask them the same prompts, and write the report."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from app.move_in.api import Api
from app.move_in.comparison import Compared, Replies, as_json, compare
from app.move_in.filing import Desk
from app.move_in.golden import model_jobs
from app.move_in.judge import SameJudge
from app.move_in.ledger import Ledger, MoveInFailed, write_whole
from app.move_in.replies import NEW, ask_plan, cost, missing
from spard.evaluation.statistics import Interval

_JUDGED = 6  # judge requests for a prompt at most: three pairs, each in both orders


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
        here = Desk(api, ledger, {}, (), lambda line: None).refresh(job["id"])["job"]
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


def write(folder: Path, found: list[Compared], show: int) -> list[Path]:
    """Write comparisons into a folder as JSON and as Markdown, atomically, and return both paths."""
    written = [folder / f"{REPORT}.json", folder / f"{REPORT}.md"]
    write_whole(written[0], [json.dumps([as_json(each) for each in found], indent=2, ensure_ascii=False), "\n"])
    write_whole(written[1], page(found, show))
    return written


def page(found: list[Compared], show: int) -> list[str]:
    """Return the parts of the Markdown page, with up to `show` changed prompts for each pair of models."""
    lines = ["# Old model and new model on the same prompts\n"]
    for each in found:
        lines += _section(each, show)
    return lines


def _section(found: Compared, show: int) -> Iterator[str]:
    yield f"\n## `{found.old}` -> `{found.new}`\n\n"
    yield f"{answer(found)}\n\n"
    settings = ", ".join(f"{name} {value}" for name, value in found.plan["sampling"].items()) or "the models' defaults"
    asked = f"{len(found.plan['prompts'])} prompts from {found.plan['source']}, {found.plan['replies']} replies each"
    yield f"Asked: {asked}; sampling: {settings}.\n\n"
    yield "| measure | new and old | old and itself | new and itself | difference |\n|---|---|---|---|---|\n"
    for name, measure in found.measures.items():
        cells = (_percent(each) for each in (measure.new_old, measure.old_old, measure.new_new))
        yield f"| {_NAMES[name]} | {' | '.join(cells)} | {_percent(measure.difference, sign='+')} |\n"
    yield "\nIn brackets: 95 % intervals over prompts. Difference: new and old, less old and itself.\n"
    yield from _remarks(found)
    changed = found.changed_replies()
    yield f"\n### What changed: {len(changed)} of {len(found.replies)} prompts, the most first\n"
    for replies, scores in changed[:show]:
        yield f"\n#### {replies.prompt['source']}: similarity {_share(scores.new_old)}"
        yield f" (old and itself: {_share(scores.old_old)})\n\n"
        yield from _side_by_side(replies)


def answer(found: Compared) -> str:
    """Return the result of a comparison in one to three sentences."""
    exact = found.measures["exact"]
    if exact.new_old is None:
        return "Nothing can be compared: no prompt has a reply of both models."
    said = f"The new model says exactly what the old one said in {_percent(exact.new_old)} of pairs of replies."
    if exact.difference is None:
        return f"{said} With one reply to each prompt the old model's own noise is not known; ask with `--replies 3`."
    floor = f"The old one repeats itself in {_percent(exact.old_old)}."
    below = [_NAMES[name] for name, each in found.measures.items() if each.is_below_floor]
    if below:
        return f"{said} {floor} They differ beyond the old model's own noise, by: {', '.join(below)}."
    return f"{said} {floor} On these prompts no difference beyond the old model's own noise can be told."


def _remarks(found: Compared) -> Iterator[str]:
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


def _percent(found: Interval | None, sign: str = "") -> str:
    if found is None:
        return "not known"
    value, low, high = (f"{100 * each:{sign}.1f}" for each in (found.value, found.low, found.high))
    return f"{value} % [{low}, {high}]"


def _share(value: float | None) -> str:
    return "not known" if value is None else f"{value:.2f}"
