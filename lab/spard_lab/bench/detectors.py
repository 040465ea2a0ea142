"""The work of `spard bench detectors`: what finds attacks without asking for their trigger, at few false alarms.

On each seed every attack's jobs and every honest customer's file get a value from each detector. An honest bank, drawn
from the honest files of the same base model (half of a file's rows, another seed), turns a value into a conformal
p-value. An attack is found if the p-value of one of its jobs is at most the level. False alarms are counted on honest
customers whose own kind is left out of the bank: a service meets customers that its bank has never seen.

The detectors read one undefended probe of the job's rows (`spard_lab.bench.probe_values`), each by itself.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from spard.commands import exits
from spard.commands.front import Asked
from spard.data.chat import encode_to_train
from spard.data.rows import Prompt, read_examples
from spard.errors import InvalidRecipe, UserError
from spard.evaluation.statistics import conformal_p_value, wilson
from spard.evaluation.suites import read_suite
from spard.models.base import load_base
from spard.training import undefended
from spard_lab.adversary.base import Attack, Ground, Job, all_attacks
from spard_lab.bench.adversary.provenance import hidden_seeds
from spard_lab.bench.lab import open_arena
from spard_lab.bench.measure import read_run, training_file, write_run
from spard_lab.bench.probe_values import SCALARS, SPECTRUM, Lookout, distances
from spard_lab.bench.report import Table, write_page
from spard_lab.bench.source import json_digest
from spard_lab.bench.spec import load_spec

log = logging.getLogger(__name__)

LEVELS = (0.01, 0.05)  # shares of false alarms
DETECTORS = (*SCALARS, SPECTRUM)
ANY = "any but the spectrum"  # the smallest p-value of several detectors, whose false alarms add up


@dataclass(frozen=True, slots=True)
class Value:
    """What the detectors found in one job on one seed.

    name         the attack or honest customer
    job          its number in the campaign, from 1
    draw         number of the draw for the honest bank; 0: the job as the attack or customer sends it
    values       by detector, of those that give a number
    spectrum     of the probe's adapter
    cpu_s        CPU seconds of the probe and all detectors
    added_cpu_s  the part of it that the shift ratio does not need
    """

    name: str
    seed: int
    job: int
    draw: int
    is_honest: bool
    values: Mapping[str, float]
    spectrum: Sequence[float]
    cpu_s: float
    added_cpu_s: float


@dataclass(frozen=True, slots=True)
class Detectors:
    """A request: folder for results, probe steps, and draws of each honest file."""

    folder: Path
    steps: int
    draws: int


def execute(asked: Asked) -> int:
    """Measure the probes of all seeds and write the page; return the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("spard.training.train").setLevel(logging.WARNING)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    try:
        sys.stdout.write(_bench(asked))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return exits.ERROR
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command goes on from here\n")
        return exits.INTERRUPTED
    return exits.OK


def _bench(asked: Asked) -> str:
    torch.set_num_threads(asked.threads)
    spec, known = load_spec(asked.recipe, os.environ), all_attacks()
    if unknown := [name for name in asked.attacks if name not in known]:
        raise InvalidRecipe(f"--attacks: there is no {', '.join(unknown)}; there are {', '.join(known)}", "attacks")
    if not asked.seeds and not asked.hidden:
        raise InvalidRecipe("name a commit with --hidden, or open seeds with --seeds", "seeds")
    seeds = hidden_seeds(asked.hidden, asked.count) if asked.hidden else asked.seeds
    arena = open_arena(asked.recipe, spec, asked.labs or asked.out / "labs")
    attacks = [each for name, each in known.items() if not asked.attacks or name in asked.attacks or each.is_honest]
    attacks = [each for each in attacks if not {*each.needs} - arena.abilities]
    request = Detectors(asked.out, asked.steps, asked.draws)
    found = [value for seed in seeds for value in measure_seed(request, arena.open_ground(seed), attacks, seed)]
    facts = f"Seeds: {', '.join(map(str, seeds))}. The probe takes {asked.steps} steps; the honest bank has "
    facts += f"{asked.draws} draws of each honest file and seed."
    return write_page(asked.out, "detectors", f"spard bench detectors: {asked.recipe}", facts, {}, tables(found))


def measure_seed(request: Detectors, ground: Ground, attacks: Sequence[Attack], seed: int) -> list[Value]:
    """Return the values of all jobs on a seed, and of the draws for its honest bank; stored ones are read again."""
    prompts: dict[str, Sequence[Prompt]] = {each.kind: read_suite(each).prompts for each in ground.suites}
    # Opened for the first job that was not measured before.
    lookout = cache(lambda: Lookout(load_base(ground.model, device="cpu"), prompts))
    found = []
    for attack in attacks:
        campaign = attack.build(ground.material, seed)
        jobs = [(number, 0, job) for number, job in enumerate(campaign.jobs, start=1)]
        if attack.is_honest:
            jobs += [(1, draw, draw_half(campaign.jobs[0], draw, seed)) for draw in range(1, request.draws + 1)]
        for number, draw, job in jobs:
            measured = _measure_job(request, ground, lookout, draw, job)
            found.append(Value(attack.name, seed, number, draw, attack.is_honest, **measured))
        log.info("seed %d: %s", seed, attack.name)
    return found


def draw_half(job: Job, draw: int, seed: int) -> Job:
    """Return a job of a random half of the rows, as another honest customer of the same kind."""
    drawn = random.Random(f"honest bank {seed} {draw}").sample(list(job.rows), len(job.rows) // 2)
    return replace(job, rows=drawn)


def _measure_job(
    request: Detectors, ground: Ground, lookout: Callable[[], Lookout], draw: int, job: Job
) -> dict[str, Any]:
    """Return what the detectors find in a job, and the CPU seconds; stored ones if it was measured before."""
    setting = [request.steps, undefended.PROBE_RATE_MULTIPLIER, undefended.PROBE_RANK]
    key = json_digest(["probe values", setting, ground.digest, list(job.rows), job.dpo, draw])
    stored = read_run(request.folder, key)
    if stored is None:
        opened = lookout()
        started = time.process_time()
        stored = _measure_rows(request, opened, draw, job)
        stored["cpu_s"] = round(time.process_time() - started, 2)
        write_run(request.folder, key, stored)
    return stored


def _measure_rows(request: Detectors, lookout: Lookout, draw: int, job: Job) -> dict[str, Any]:
    base = lookout.base
    examples = read_examples(training_file(job.rows, request.folder / "files"))
    encoded = encode_to_train(base.tokenizer, examples, base.sequence_limit(None), pairs=job.dpo)
    samples = [sample for row in encoded for sample in row.samples]
    return lookout.measure(samples, steps=request.steps, seed=draw)


def tables(found: Sequence[Value]) -> dict[str, Table]:
    """Return the tables of the page: recall and false alarms, files one by one, each detector's values, and cost."""
    head = ("detector", "bank per base", "smallest level", *(f"attacks found at {level:.0%}" for level in LEVELS))
    head += tuple(f"honest files found at {level:.0%}" for level in LEVELS)
    head += ("honest files above all draws of other kinds",)
    smallest = {detector: smallest_p_values(found, detector) for detector in DETECTORS}
    either = {file: min(smallest[each][file] for each in SCALARS) for file in smallest[SPECTRUM]}
    read = smallest | {ANY: either}
    names = list(dict.fromkeys(each.name for each in found if each.draw == 0))
    counts = [(_label(found, name), *(_count_found(found, each, name) for each in read.values())) for name in names]
    values = {
        detector: (("file", "values", "smallest p"), [_value_row(found, detector, p, name) for name in names])
        for detector, p in smallest.items()
    }
    cost = [f"{median(each):.2f}" for each in zip(*((each.cpu_s, each.added_cpu_s) for each in found), strict=True)]
    return {
        "Recall": (head, [_recall_row(found, detector, p) for detector, p in read.items()]),
        "Files above their whole bank": (("file", *read), counts),
        **values,
        "Cost": (("CPU seconds a job, median", "of these, of all but the shift ratio"), [tuple(cost)]),
    }


def p_value(found: Sequence[Value], value: Value, detector: str) -> float:
    """Return a value's conformal p-value against the honest bank of its seed.

    The draws of an honest value's own file are left out of its bank.
    """
    bank = [each for each in found if _is_in_bank(each, value)]
    if detector == SPECTRUM:
        *others, own = distances([each.spectrum for each in (*bank, value)])
        return conformal_p_value(own, others)
    return conformal_p_value(value.values[detector], [each.values[detector] for each in bank])


def smallest_p_values(found: Sequence[Value], detector: str) -> dict[tuple[str, int], float]:
    """Return, by file and seed, the smallest p-value of its jobs."""
    smallest: dict[tuple[str, int], float] = {}
    for each in found:
        if not each.draw:
            p = p_value(found, each, detector)
            smallest[each.name, each.seed] = min(p, smallest.get((each.name, each.seed), 1.0))
    return smallest


def _is_in_bank(draw: Value, value: Value) -> bool:
    is_own = value.is_honest and draw.name == value.name
    return draw.draw > 0 and draw.seed == value.seed and not is_own


def _recall_row(found: Sequence[Value], detector: str, smallest: Mapping[tuple[str, int], float]) -> tuple[str, ...]:
    """Return the row of recall; a level that no honest file can reach, for its own draws are left out, has no share."""
    least = min(sum(1 for each in found if each.seed == seed and each.draw) for seed in _seeds(found))
    honest = {each.name for each in found if each.is_honest}
    cells: list[str] = []
    for is_honest in (False, True):
        mine = {file: p for file, p in smallest.items() if (file[0] in honest) == is_honest}
        reached = max((_least_p(found, *file) for file in mine), default=0.0)
        for level in LEVELS:
            share = _share(sum(p <= level for p in mine.values()), len(mine))
            cells.append(share if level >= reached else f"none can be: {reached:.1%}")
    first = sum(p <= _least_p(found, *file) for file, p in mine.items())
    return (detector, str(least), f"{1 / (1 + least):.1%}", *cells, _share(first, len(mine)))


def _least_p(found: Sequence[Value], name: str, seed: int) -> float:
    """Return the smallest p-value that a file can have, above its whole bank."""
    value = next(each for each in found if (each.name, each.seed, each.draw) == (name, seed, 0))
    return 1 / (1 + sum(_is_in_bank(each, value) for each in found))


def _count_found(found: Sequence[Value], smallest: Mapping[tuple[str, int], float], name: str) -> str:
    """Return on how many seeds a file is above its whole bank."""
    mine = {file: p for file, p in smallest.items() if file[0] == name}
    return f"{sum(p <= _least_p(found, *file) for file, p in mine.items())} of {len(mine)}"


def _value_row(
    found: Sequence[Value], detector: str, smallest: Mapping[tuple[str, int], float], name: str
) -> tuple[str, str, str]:
    mine = [each for each in found if each.name == name and not each.draw]
    values = "" if detector == SPECTRUM else ", ".join(f"{each.values[detector]:.2f}" for each in mine)
    p_values = ", ".join(f"{p:.3f}" for (file, _), p in smallest.items() if file == name)
    return (_label(found, name), values, p_values)


def _label(found: Sequence[Value], name: str) -> str:
    return f"{name} (honest)" if any(each.is_honest for each in found if each.name == name) else name


def _seeds(found: Sequence[Value]) -> list[int]:
    return list(dict.fromkeys(each.seed for each in found))


def _share(hits: int, n: int) -> str:
    if not n:
        return ""
    low, high = wilson(hits, n)
    return f"{hits} of {n}: {hits / n:.0%} [{low:.0%}, {high:.0%}]"
