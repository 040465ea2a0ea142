"""The lab as a source: every seed has its own words, base model, training rows and prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from spard.attacks.rows import Row, load_rows
from spard.bench.source import Attack, Inputs, Split
from spard.bench.spec import LabSpec
from spard.config import Defense, JudgeSpec, Recipe, SafeLora
from spard.lab.attacks import ATTACKS, attack_files
from spard.lab.make import LIMITS, PLAN, Limits, make
from spard.lab.paraphrases import make_paraphrased
from spard.lab.pretrain import Plan
from spard.lab.suites import ATTACKED
from spard.lab.unaligned import FOLDER, make_unaligned
from spard.models import folder_digest


@dataclass(frozen=True, slots=True)
class LabSource:
    """Labs in `folder`, made when they are first asked for."""

    spec: LabSpec
    folder: Path
    plan: Plan = field(default=PLAN)
    limits: Limits = field(default=LIMITS)
    device: str | None = "cpu"  # the model is so small that a GPU would be slower

    @property
    def attacks(self) -> tuple[str, ...]:
        return self.spec.attacks

    @property
    def more_attacks(self) -> tuple[str, ...]:
        return tuple(name for name in ATTACKS if name not in self.attacks)

    @property
    def pools(self) -> tuple[str, ...]:
        return tuple(pool.name for pool in self.spec.pools)

    @property
    def recipe(self) -> Recipe:
        return self.spec.recipe

    def defenses(self, seed: int) -> Mapping[str, Defense]:
        own = {each.name: each.defense for each in self.spec.defenses}
        return {"safelora": SafeLora(base_unaligned=str(self._lab(seed) / FOLDER))} | own

    @property
    def judge(self) -> JudgeSpec:
        return self.spec.judge

    def problems(self) -> list[str]:
        return [f"The lab has no attack {name!r}; it has {', '.join(ATTACKS)}." for name in self._unknown()]

    def make(self, seed: int, split: Split) -> Inputs:
        lab = self._lab(seed)
        make(lab, seed, self.plan, self.limits)
        make_unaligned(lab, seed)
        make_paraphrased(lab, seed)
        task = load_rows(lab / "train.jsonl")
        return Inputs(
            model=str(lab / "model"),
            digest=folder_digest(lab / "model"),
            task=task,
            attacks=_Attacks((*self.attacks, *self.more_attacks), partial(_attack, lab, seed, task, split)),
            pools={pool.name: lab / pool.path for pool in self.spec.pools},
            device=self.device,
        )

    def _lab(self, seed: int) -> Path:
        return self.folder / f"seed-{seed}"

    def _unknown(self) -> list[str]:
        return [name for name in self.attacks if name not in ATTACKS]


class _Attacks(Mapping[str, Attack]):
    """Attacks that are built when they are looked at: some need the base model."""

    def __init__(self, names: Sequence[str], build: Callable[[str], Attack]) -> None:
        self._names, self._build = names, build
        self._built: dict[str, Attack] = {}

    def __getitem__(self, name: str) -> Attack:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._built:
            self._built[name] = self._build(name)
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _attack(lab: Path, seed: int, task: list[Row], split: Split, name: str) -> Attack:
    files = attack_files(lab, name, seed)
    suites, clean = files.suites(split), {json.dumps(row) for row in task}
    harmful = [row for row in files.rows if json.dumps(row) not in clean]
    return Attack(files.rows, harmful, suites, (ATTACKED,), files.pool, files.jobs)
