"""Which attack met which arm on which seed, and what came of it; done once, kept, and found again."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from spard.config import JudgeSpec, Recipe
from spard.config.run_spec import to_mapping
from spard.digests import file_sha256
from spard.evaluation.audit import sample
from spard.models.base import load_base
from spard.research.adversary.arena import Arena, Ground
from spard.research.adversary.base import Attack, Campaign
from spard.research.bench.adversary.asking import Answers, ask_model
from spard.research.bench.adversary.campaign import Ending, Memory, Service, run_campaign
from spard.research.bench.source import digest_of
from spard.research.bench.store import read_run, write_run

log = logging.getLogger(__name__)

BASE = "base"


@dataclass(frozen=True, slots=True)
class Round:
    """One attack on one arm and seed.

    `lacks` are the abilities for want of which it was not possible. `base` is the base model, asked in the attack's
    way; `answers` the last model that was trained, whether it was released or not.
    """

    attack: str
    method: str
    seed: int
    ending: Ending | Literal["not possible"]
    job: int = 0
    reasons: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    base: Answers | None = None
    answers: Answers | None = None
    cpu_s: float | None = None


@dataclass(frozen=True, slots=True)
class Bench:
    """What is asked for: arms by the name of their method, attacks, seeds, prompts of each kind, and a folder.

    `provider` are the provider's settings, for all arms.
    """

    arena: Arena
    arms: Mapping[str, Recipe]
    attacks: Sequence[Attack]
    seeds: Sequence[int]
    judge: JudgeSpec
    prompts: int
    folder: Path
    provider: tuple[tuple[str, str], ...] = ()


def run_rounds(bench: Bench) -> Iterator[Round]:
    """Yield every round, by seed and attack; those that are not possible too."""
    for seed in bench.seeds:
        cache, ground = Memory(), bench.arena.ground(seed)
        for attack in bench.attacks:
            lacks = tuple(sorted({*attack.needs} - bench.arena.abilities))
            if lacks:
                yield from (Round(attack.name, method, seed, "not possible", lacks=lacks) for method in bench.arms)
                continue
            yield from _of_attack(bench, ground, attack, seed, cache)


def _of_attack(bench: Bench, ground: Ground, attack: Attack, seed: int, cache: Memory) -> Iterator[Round]:
    campaign = attack.build(ground.material, seed)
    asked = _asked(ground, campaign, bench.prompts)
    base = _base_answers(bench, ground, campaign, asked)
    for method, recipe in bench.arms.items():
        settings = [to_mapping(recipe), asdict(bench.judge), *sorted(bench.provider)]
        key = digest_of([asked, _decided(ground, campaign), *settings])
        found = read_run(bench.folder, key)
        if found is None:
            ended = run_campaign(campaign, Service(ground, recipe, bench.judge, bench.folder, cache, bench.provider))
            answers = None
            if ended.base is not None:
                system = recipe.defense.serving_prompt
                answers = ask_model(ended.model, ended.base, ground, campaign, bench.prompts, system)
            done = Round(
                attack.name, method, seed, ended.ending, ended.job, ended.reasons, (), base, answers, ended.cpu_s
            )
            found = asdict(done)
            write_run(bench.folder, key, found)
        # equal settings may have another name here
        done = replace(from_json(found), attack=attack.name, method=method, base=base)
        log.info("seed %d, %s, %s: %s", seed, attack.name, method, done.ending)
        yield done


def from_json(raw: Mapping[str, Any]) -> Round:
    """Read a round from the JSON of its `asdict`."""
    both = {name: Answers(**raw[name]) if raw[name] else None for name in ("base", "answers")}
    return Round(**{**raw, **both, "reasons": tuple(raw["reasons"]), "lacks": tuple(raw["lacks"])})


def _base_answers(bench: Bench, ground: Ground, campaign: Campaign, asked: Any) -> Answers:
    """Ask the base model as the attack will: what it does already is not the attack's work."""
    key = digest_of([BASE, asked])
    found = read_run(bench.folder, key)
    if found is None:
        base = load_base(ground.model, device="cpu")
        found = asdict(ask_model(base.model, base, ground, campaign, bench.prompts, None))
        write_run(bench.folder, key, found)
    return Answers(**found)


def _asked(ground: Ground, campaign: Campaign, n: int) -> Any:
    """Return everything that the answers of a given model depend on."""
    harmful, benign, task = (sample(each, n) for each in (ground.harmful, ground.benign, ground.task))
    ways = [
        *([each, campaign.dress(each)] for each in (*harmful, *benign)),
        *([each, campaign.task(each)] for each in task),
    ]
    asked = [[asdict(each) for each in way] for way in ways]
    return [ground.digest, campaign.opening, list(campaign.tools), asked]


def _decided(ground: Ground, campaign: Campaign) -> Any:
    """Return everything that the jobs and the gate depend on, but for the recipe and the judge."""
    jobs = [
        [list(job.rows), job.pool and list(job.pool), asdict(job.hyperparameters), *(["dpo"] if job.dpo else [])]
        for job in campaign.jobs
    ]
    return [jobs, file_sha256(ground.pool), [[each.name, each.kind, file_sha256(each.path)] for each in ground.suites]]
