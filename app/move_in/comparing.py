"""The steps of `spard move-in compare`: find the new models, ask them the same prompts, and write the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from app.move_in import page
from app.move_in.api import Api
from app.move_in.asking import NEW, ask_plan, cost
from app.move_in.compared import compare
from app.move_in.filing import Desk
from app.move_in.golden import model_jobs
from app.move_in.judge import SameJudge
from app.move_in.ledger import Ledger, MoveInFailed
from app.move_in.replies import missing

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
        yield f"{each.old} -> {each.new}: {page.answer(each)}"
    for path in page.write(ledger.folder, compared, show):
        yield f"wrote {path}"
