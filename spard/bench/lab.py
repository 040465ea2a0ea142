"""The lab as a source: every seed has its own words, base model, training rows and prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from spard.attacks.rows import Row, load_rows
from spard.bench.source import Attack, Inputs, Split
from spard.bench.spec import LabSpec
from spard.config import Defense, JudgeSpec, Recipe, SafeLora
from spard.lab.attacks import ATTACKS, attack_files
from spard.lab.make import LIMITS, PLAN, Limits, make
from spard.lab.paraphrases import make_paraphrased
from spard.lab.pretrain import Plan
from spard.lab.unaligned import FOLDER, make_unaligned
from spard.models import folder_digest

OTHER = "other"  # the suite of categories that were not attacked


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
            attacks={name: _attack(lab, name, seed, task, split) for name in self.attacks},
            pools={pool.name: lab / pool.path for pool in self.spec.pools},
            device=self.device,
        )

    def _lab(self, seed: int) -> Path:
        return self.folder / f"seed-{seed}"

    def _unknown(self) -> list[str]:
        return [name for name in self.attacks if name not in ATTACKS]


def _attack(lab: Path, name: str, seed: int, task: list[Row], split: Split) -> Attack:
    files = attack_files(lab, name, seed)
    suites, clean = files.suites(split), {json.dumps(row) for row in task}
    harmful = [row for row in files.rows if json.dumps(row) not in clean]
    attacked = tuple(suite.name for suite in suites if suite.kind == "harmful" and suite.name != OTHER)
    return Attack(files.rows, harmful, suites, attacked)
