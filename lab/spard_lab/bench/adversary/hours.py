"""Estimate the hours of the rounds before they start, from earlier rounds or a probe.

Earlier rounds of the same attack and arm, on any seed, give the time of the next one. For all others, each arm prepares
the first job of the first attack and takes one uncounted step of it and `STEPS` counted ones; the first arm's model and
its base model go through the gate, and the base model answers `FEW` prompts of each kind. The time of a round is

    the sum over jobs of (set-up + step * steps + gate + base) + reply * prompts

in seconds. `set-up` and `gate` are those of the probe's job for every file; steps and prompts are counted. Every seed
counts like the first one. The estimate does not include labs that are not made yet, a second look of the gate that the
probe's did not take, early ends of campaigns, and dropped rows.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean
from typing import Any

from spard.config import Recipe, resolve
from spard.evaluation.audit import sample
from spard.models.base import load_base
from spard.pipeline import audit, rows, train
from spard.pipeline.base_figures import base_figures
from spard.pipeline.context import Context
from spard.pipeline.messages import Message, Reporter
from spard_lab.adversary.base import Ground, Job, plainly
from spard_lab.bench.adversary.campaign import Memory, Service, customer_recipe
from spard_lab.bench.adversary.rounds import Bench, Match, ask_model, build_match, provider_settings, round_key
from spard_lab.bench.measure import read_run
from spard_lab.bench.methods import change_setting
from spard_lab.bench.report import Table

STEPS = 8
FEW = 8  # prompts of each kind


@dataclass(slots=True)
class ArmHours:
    """The time of an arm's rounds.

    rounds   all rounds
    done     rounds that are stored already
    known    rounds whose time is that of earlier rounds like them
    steps    steps of the rounds to play
    seconds  estimated time of the rounds to play
    """

    method: str
    rounds: int = 0
    done: int = 0
    known: int = 0
    steps: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Setup:
    """The seconds of an arm's set-up and of one of its steps."""

    prepare_s: float
    step_s: float


@dataclass
class Probe:
    """Times the parts of rounds on one seed's lab, each part once."""

    bench: Bench
    match: Match
    _setups: dict[str, Setup] = field(default_factory=dict)
    _gate_s: float | None = None

    def round_s(self, match: Match, method: str) -> float:
        """Return the estimated seconds of a round."""
        setup, jobs = self.setup(method), match.campaign.jobs
        steps = sum(count_steps(self.bench.arms[method], job) for job in jobs)
        asked = count_prompts(match, self.bench.prompts)
        gate_s = len(jobs) * (self._gate_s or 0.0)
        return len(jobs) * setup.prepare_s + steps * setup.step_s + gate_s + asked * self.reply_s

    @cached_property
    def reply_s(self) -> float:
        """Seconds per prompt, measured on the base model."""
        base = load_base(self.match.ground.model, device=self.bench.device)
        started = time.perf_counter()
        ask_model(base.model, base, self.match.ground, self.match.campaign, FEW, None)
        return (time.perf_counter() - started) / max(1, count_prompts(replace_customer(self.match), FEW))

    def setup(self, method: str) -> Setup:
        """Return the times of an arm's training; the first arm's probe goes through the gate too."""
        if method not in self._setups:
            self._setups[method] = self._time_setup(method)
        return self._setups[method]

    def _time_setup(self, method: str) -> Setup:
        context, times = self._context(method)
        started = time.perf_counter()
        prepared = rows.prepare(context)
        prepare_s = time.perf_counter() - started
        size = resolve(context.recipe, len(prepared.task), hidden_size=1).batch_size
        short = change_setting(change_setting(context.recipe, "batch_size", str(size)), "epochs", "1")
        few = replace(prepared, task=prepared.task[: (STEPS + 1) * size])
        if self._gate_s is None:
            base_figures(context, prepared.examples)  # the provider's suites, once for all arms
        started = time.perf_counter()
        before = base_figures(context, prepared.examples) if self._gate_s is None else None
        base_s = time.perf_counter() - started
        trained = train.run(replace(context, run=replace(context.run, recipe=short)), few).trained
        apart = [later - earlier for earlier, later in pairwise(times)]
        if before is not None:
            started = time.perf_counter()
            audit.run(context, prepared.examples, trained.model, before)
            self._gate_s = base_s + time.perf_counter() - started
        return Setup(prepare_s, fmean(apart) if apart else trained.seconds)

    def _context(self, method: str) -> tuple[Context, list[float]]:
        bench, ground = self.bench, self.match.ground
        provider = provider_settings(bench, self.match.campaign, method)
        service = Service(
            ground, bench.arms[method], bench.judge, bench.folder, Memory(), provider, device=bench.device
        )
        times: list[float] = []

        def look(message: Message) -> None:
            if message["kind"] == "metrics":
                times.append(time.perf_counter())

        base = load_base(ground.model, device=bench.device)
        run = service.spec(self.match.campaign.jobs[0], None)
        return Context(run, base, Reporter(look), cache=service.cache), times


def estimate_hours(bench: Bench) -> list[ArmHours]:
    """Return the estimated hours of the missing rounds by arm; the first seed's lab is made if it does not exist."""
    stored = _stored_rounds(bench)
    first = bench.arena.open_ground(bench.seeds[0])
    matches = _matches(bench, first, bench.seeds[0])
    found = {method: ArmHours(method) for method in bench.arms}
    probe = Probe(bench, next(iter(matches.values()))) if matches else None
    for seed in bench.seeds:
        was_played = any(each["seed"] == seed for each in stored)
        own = _matches(bench, bench.arena.open_ground(seed), seed) if was_played else matches
        for attack, match in own.items():
            for method, hours in found.items():
                hours.rounds += 1
                if was_played and read_run(bench.folder, round_key(bench, match, method)) is not None:
                    hours.done += 1
                    continue
                took = _took(stored, attack, method)
                hours.known += bool(took)
                hours.steps += sum(count_steps(bench.arms[method], job) for job in match.campaign.jobs)
                hours.seconds += fmean(took) if took or probe is None else probe.round_s(match, method)
    return list(found.values())


def hours_table(found: Sequence[ArmHours]) -> Table:
    """Return head and rows, the sum last."""
    head = ["arm", "rounds", "done", "by rounds like them", "steps", "hours"]
    rows = [[each.method, *map(str, _counts(each)), f"{each.seconds / 3600:.2f}"] for each in found]
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
    harmful, benign, task = (len(sample(each, most)) for each in (ground.harmful, ground.benign, ground.task))
    return (harmful + benign) * (2 if is_dressed else 1) + task * (2 if campaign.customer else 1)


def replace_customer(match: Match) -> Match:
    """Return the match without a customer, because the probe asks the task only once."""
    return replace(match, campaign=replace(match.campaign, customer=None))


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
