"""Estimate the hours of the rounds before they start, from earlier rounds or a probe.

Earlier rounds of the same attack and arm, on any seed, give the time of the next one. For all others, each arm prepares
the first rows of the first attack's first job, and takes one uncounted step of it and `STEPS` counted ones. After
`TIMING_S` seconds of this, further arms take the times of the first timed arm with their defense (`~`). The base model
answers some prompts. The time of a round is

    the sum over jobs of (set-up + embed * (rows + pool) + step * steps) + reply * prompts

in seconds: `embed` embeds one row, for each pass over rows and pool that the arm's set-up makes; the prompts are the
bench's, and all of the gate's suites for each job, though an audit may end before it has asked them all. Every seed
counts like the first one, and every job has as many suites as the probe's. If the first seed's lab is not made yet and
its arena has a stand-in with random weights, the times are those of the stand-in, whose replies get as many tokens as
the longest answer of the rows. The estimate does not include labs that are not made yet, early ends of campaigns, and
dropped rows.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from spard.config import Defense, Recipe, resolve
from spard.data.jsonl import file_chunks, numbered_rows
from spard.models.base import Base, load_base
from spard.pipeline import rows, train
from spard.pipeline.audit import run_suites
from spard.pipeline.context import Context
from spard.pipeline.messages import Message, Reporter
from spard.selection.embeddings import embed
from spard_lab.adversary.base import Ground, Job, plainly
from spard_lab.attacks.rows import Row, last_answer
from spard_lab.bench.adversary.campaign import Memory, Service, customer_recipe
from spard_lab.bench.adversary.rounds import REPLY_TOKENS, Bench, Match, build_match, provider_settings, round_key
from spard_lab.bench.estimate import EMBEDDED, POOL, STEPS, TIMING_S, reply_seconds
from spard_lab.bench.measure import read_run
from spard_lab.bench.methods import change_setting
from spard_lab.bench.report import Table


@dataclass(slots=True)
class ArmHours:
    """The time of an arm's rounds.

    rounds   all rounds
    done     rounds that are stored already
    known    rounds whose time is that of earlier rounds like them
    steps    steps of the rounds to play
    seconds  estimated time of the rounds to play
    is_timed  no time is that of another arm with the same defense
    """

    method: str
    rounds: int = 0
    done: int = 0
    known: int = 0
    steps: int = 0
    seconds: float = 0.0
    is_timed: bool = True


@dataclass(frozen=True, slots=True)
class Setup:
    """The seconds of an arm's set-up on a few rows and of one of its steps.

    passes   times that the whole set-up embeds rows and pool
    gated    prompts of the gate's suites
    """

    prepare_s: float
    step_s: float
    passes: int = 0
    gated: int = 0


@dataclass
class Probe:
    """Times the parts of rounds on one lab, each part once; `is_trained` is False for a stand-in."""

    bench: Bench
    match: Match
    is_trained: bool = True
    _setups: dict[str, Setup] = field(default_factory=dict)
    _of_defense: dict[type[Defense], Setup] = field(default_factory=dict)  # of the first timed arm of each
    _timing_s: float = 0.0
    _gated: int | None = None  # prompts of the gate's suites, counted at the first timed arm

    def round_s(self, match: Match, method: str) -> float:
        """Return the estimated seconds of a round."""
        setup, jobs = self.setup(method), match.campaign.jobs
        steps = sum(count_steps(self.bench.arms[method], job) for job in jobs)
        embedded = setup.passes * sum(len(job.rows) + self._pool_rows(job) for job in jobs)
        asked = count_prompts(match, self.bench.prompts) + len(jobs) * setup.gated
        trained_s = len(jobs) * setup.prepare_s + steps * setup.step_s
        return trained_s + (embedded * self.embed_s if embedded else 0.0) + asked * self.reply_s

    @cached_property
    def reply_s(self) -> float:
        """Seconds per prompt, measured on the base model."""
        ground, limit = self.match.ground, REPLY_TOKENS
        if not self.is_trained:
            answers = [last_answer(row) for row in self.match.campaign.jobs[0].rows]
            limit = min(limit, 1 + max(map(len, self._base.tokenizer(answers)["input_ids"])))
        mixed = [each for kinds in zip(ground.harmful, ground.benign, ground.task, strict=False) for each in kinds]
        return reply_seconds(self._base, mixed, limit)

    @cached_property
    def embed_s(self) -> float:
        """Seconds of embedding one row, measured on the base model."""
        texts = [each.prompt for each in self.match.ground.harmful[:EMBEDDED]]
        started = time.perf_counter()
        embed(self._base, texts)
        return (time.perf_counter() - started) / len(texts)

    def setup(self, method: str) -> Setup:
        """Return the times of an arm's training."""
        kind = type(self.bench.arms[method].defense)
        if method not in self._setups:
            if self._timing_s >= TIMING_S and kind in self._of_defense:
                return self._of_defense[kind]
            started = time.perf_counter()
            self._setups[method] = self._time_setup(method)
            self._timing_s += time.perf_counter() - started
            self._of_defense.setdefault(kind, self._setups[method])
        return self._setups[method]

    def is_timed(self, method: str) -> bool:
        """Return True if the arm's own training was timed."""
        return method in self._setups

    @cached_property
    def _base(self) -> Base:
        return load_base(self.match.ground.model, device=self.bench.device)

    def _pool_rows(self, job: Job) -> int:
        return len(self._provider_pool if job.pool is None else job.pool)

    @cached_property
    def _provider_pool(self) -> list[Row]:
        return [row for _, row in numbered_rows(file_chunks(self.match.ground.pool))]

    def _time_setup(self, method: str) -> Setup:
        context, times = self._context(method)
        started = time.perf_counter()
        prepared = rows.prepare(context)
        prepare_s = time.perf_counter() - started
        trained = train.run(context, prepared).trained
        apart = [later - earlier for earlier, later in pairwise(times)]
        passes = context.recipe.uses_pool + (context.run.row_signal.action != "off")
        if self._gated is None:  # of every arm: the rows are the same, and mining suites of them takes seconds
            suites = run_suites(context, prepared.examples)
            self._gated = sum(min(len(suite.prompts), context.recipe.audit.max_prompts) for suite in suites)
        return Setup(prepare_s, fmean(apart) if apart else trained.seconds, passes, self._gated)

    def _context(self, method: str) -> tuple[Context, list[float]]:
        """Return the context of a training of at most `STEPS` + 1 steps, and a list that gets the time of each step."""
        bench, ground, campaign = self.bench, self.match.ground, self.match.campaign
        first = campaign.jobs[0]
        size = resolve(customer_recipe(bench.arms[method], first), len(first.rows), hidden_size=1).batch_size
        recipe = change_setting(change_setting(bench.arms[method], "batch_size", str(size)), "epochs", "1")
        pool = list(first.pool if first.pool is not None else self._provider_pool)
        pool = pool[:: max(1, len(pool) // POOL)]  # evenly spaced: its sides may follow each other
        short = Job(first.rows[: (STEPS + 1) * size], pool, dpo=first.dpo)
        provider = provider_settings(bench, campaign, method)
        service = Service(ground, recipe, bench.judge, bench.folder, Memory(), provider, device=bench.device)
        times: list[float] = []

        def look(message: Message) -> None:
            if message["kind"] == "metrics":
                times.append(time.perf_counter())

        base = load_base(ground.model, device=bench.device)
        return Context(service.spec(short, None), base, Reporter(look), cache=service.cache), times


def estimate_hours(bench: Bench) -> list[ArmHours]:
    """Return the estimated hours of the missing rounds by arm.

    If the first seed's lab does not exist, a stand-in with random weights takes its place; an arena without stand-ins
    makes the lab.
    """
    stored = _stored_rounds(bench)
    with TemporaryDirectory(prefix="spard-estimate-") as aside:
        stand_in = bench.arena.open_untrained(bench.seeds[0], Path(aside) / "lab")
        first = stand_in or bench.arena.open_ground(bench.seeds[0])
        matches = _matches(bench, first, bench.seeds[0])
        found = {method: ArmHours(method) for method in bench.arms}
        probe = Probe(bench, next(iter(matches.values())), stand_in is None) if matches else None
        played = {each["seed"] for each in stored}
        unplayed = sum(seed not in played for seed in bench.seeds)
        own = [(1, _matches(bench, bench.arena.open_ground(seed), seed)) for seed in bench.seeds if seed in played]
        for seeds, of_seed in [*own, *([(unplayed, matches)] if unplayed else [])]:
            for (attack, match), (method, hours) in product(of_seed.items(), found.items()):
                hours.rounds += seeds
                if of_seed is not matches and read_run(bench.folder, round_key(bench, match, method)) is not None:
                    hours.done += 1
                    continue
                took = _took(stored, attack, method)
                hours.known += seeds * bool(took)
                hours.steps += seeds * sum(count_steps(bench.arms[method], job) for job in match.campaign.jobs)
                hours.seconds += seeds * (fmean(took) if took or probe is None else probe.round_s(match, method))
        for method, hours in found.items():
            hours.is_timed = probe is None or hours.known + hours.done == hours.rounds or probe.is_timed(method)
    return list(found.values())


def hours_table(found: Sequence[ArmHours]) -> Table:
    """Return head and rows, the sum last."""
    head = ["arm", "rounds", "done", "by rounds like them", "steps", "hours"]
    rows = [
        [each.method, *map(str, _counts(each)), f"{'' if each.is_timed else '~'}{each.seconds / 3600:.2f}"]
        for each in found
    ]
    sums = [sum(counts) for counts in zip(*map(_counts, found), strict=True)]
    return head, [*rows, ["all", *map(str, sums), f"{sum(each.seconds for each in found) / 3600:.2f}"]]


def count_steps(recipe: Recipe, job: Job) -> int:
    """Return the number of steps of a job if no row is dropped."""
    resolved = resolve(customer_recipe(recipe, job), len(job.rows), hidden_size=1)
    return resolved.n_epochs * math.ceil(len(job.rows) / resolved.batch_size)


def count_prompts(match: Match, most: int) -> int:
    """Return the number of prompts in a round; a customer's task is asked at half of the steps too."""
    ground, campaign = match.ground, match.campaign
    is_dressed = campaign.dress is not plainly or bool(campaign.opening or campaign.tools)
    harmful, benign, task = (min(len(each), most) for each in (ground.harmful, ground.benign, ground.task))
    return (harmful + benign) * (2 if is_dressed else 1) + task * (2 if campaign.customer else 1)


def _counts(found: ArmHours) -> tuple[int, int, int, int]:
    return found.rounds, found.done, found.known, found.steps


def _matches(bench: Bench, ground: Ground, seed: int) -> dict[str, Match]:
    """Return the matches of the possible attacks, by name."""
    possible = [each for each in bench.attacks if not {*each.needs} - bench.arena.abilities]
    return {each.name: build_match(bench, ground, each, seed) for each in possible}


def _stored_rounds(bench: Bench) -> list[Mapping[str, Any]]:
    """Return the stored rounds, without the stored answers of base models."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in (bench.folder / "runs").glob("*.json")]
    return [each for each in found if "ending" in each]


def _took(stored: Sequence[Mapping[str, Any]], attack: str, method: str) -> list[float]:
    """Return the seconds of stored rounds of an attack and arm; old rounds have none."""
    found = [each.get("wall_s") for each in stored if (each["attack"], each["method"]) == (attack, method)]
    return [each for each in found if each is not None]
