"""The labs as a source; every seed of the small lab has its own words, base model, training rows and prompts.

Seeds of a lab of natural English share its base model; each has its own rows and prompts. The arena of an adversary's
bench is a lab too.

For SafeLoRA a lab's model is also given without its alignment: fine-tuned to comply with the requests it was aligned to
refuse. Real models have an unaligned release. The lab's model is aligned while it learns everything else, so its
unaligned twin is made afterward, by full fine-tuning on alignment's own harmful requests and nothing else.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from spard.config import Defense, Hyperparameters, JudgeSpec, NoDefense, Recipe, resolve
from spard.data.chat import encode_all
from spard.data.rows import example
from spard.digests import folder_digest
from spard.errors import InvalidRecipe
from spard.models.adapters import save_full
from spard.models.base import load_base
from spard.training.train import train
from spard_lab.adversary.base import Arena
from spard_lab.adversary.lab import LabArena
from spard_lab.adversary.natural import NaturalArena, RealArena
from spard_lab.attacks.rows import Row, load_rows
from spard_lab.bench.methods import with_unaligned
from spard_lab.bench.source import Attack, Inputs, Split
from spard_lab.bench.spec import BenchSpec, LabSpec, NaturalSpec
from spard_lab.lab.attacks import attack_files, attack_names
from spard_lab.lab.corpus import ATTACKED_SUITE, chat, comply, make_corpus
from spard_lab.lab.grammar import find_action
from spard_lab.lab.make import LIMITS, PLAN, Limits, make, make_untrained
from spard_lab.lab.natural.base import BaseSettings, LabSettings, folder_name, make_natural
from spard_lab.lab.natural.sizes import SIZES
from spard_lab.lab.pools import FILE, join_sides, make_paraphrased, make_two_sided
from spard_lab.lab.pretrain import Plan

log = logging.getLogger(__name__)

TWO_SIDED = "two_sided"  # the name of the pool with benign rows


@dataclass(frozen=True, slots=True)
class LabSource:
    """The labs in `folder`, made on first use."""

    spec: LabSpec
    folder: Path
    plan: Plan = field(default=PLAN)
    limits: Limits = field(default=LIMITS)
    device: str | None = "cpu"  # the model is so small that a GPU is slower

    @property
    def attacks(self) -> tuple[str, ...]:
        """The names of the attacks that the recipe lists."""
        return self.spec.attacks

    @property
    def more_attacks(self) -> tuple[str, ...]:
        """All other attacks of the lab."""
        return tuple(name for name in attack_names() if name not in self.attacks)

    @property
    def pools(self) -> tuple[str, ...]:
        """The names of the recipe's pools, in its order."""
        return tuple(pool.name for pool in self.spec.pools)

    @property
    def more_pools(self) -> tuple[str, ...]:
        """The whole pool with a benign side."""
        return (TWO_SIDED,)

    @property
    def recipe(self) -> Recipe:
        """The recipe's training settings, the same for every lab."""
        return self.spec.recipe

    def defenses(self, seed: int) -> Mapping[str, Defense]:
        """Return the methods that need the small lab's unaligned twin, overridden by the recipe's own."""
        own = {each.name: each.defense for each in self.spec.defenses}
        return own if self.spec.natural else with_unaligned({}, str(self._lab(seed) / UNALIGNED)) | own

    @property
    def judge(self) -> JudgeSpec:
        """The recipe's judge; shipped recipes name the one that knows the truth of their lab."""
        return self.spec.judge

    def problems(self) -> list[str]:
        """Return a sentence for each unknown attack or size and each missing folder.

        The lab makes everything else itself.
        """
        found = [f"The lab has no attack {name!r}; it has {', '.join(attack_names())}." for name in self._unknown()]
        if self.spec.real:
            found.append(
                "The real model's lab is for `spard bench detectors`; `benchmarks.real_model` trains methods on it."
            )
        natural = self.spec.natural
        if natural and natural.size not in SIZES:
            found.append(f"The lab of natural English has no size {natural.size!r}; it has {', '.join(SIZES)}.")
        if natural and natural.texts and not natural.texts.is_dir():
            found.append(f"The folder of real text {natural.texts} is not there.")
        return found

    def make(self, seed: int, split: Split) -> Inputs:
        """Return the inputs of a seed; make its lab and further pools if they do not exist.

        Making a lab takes minutes. Its unaligned twin is made with the first run that needs it.
        """
        lab = self.make_lab(seed)
        if self.spec.natural:
            join_sides(lab, seed)
        else:
            make_paraphrased(lab, seed)
            make_two_sided(lab, seed)
        task = load_rows(lab / "train.jsonl")
        return Inputs(
            model=str(lab / "model"),
            digest=folder_digest(lab / "model"),
            task=task,
            attacks=_Attacks((*self.attacks, *self.more_attacks), partial(_attack, lab, seed, task, split)),
            pools={TWO_SIDED: lab / FILE, **{pool.name: lab / pool.path for pool in self.spec.pools}},
            device=self.device,
            make_unaligned=None if self.spec.natural else partial(make_unaligned, lab, seed),
        )

    def make_lab(self, seed: int) -> Path:
        """Return the folder of the seed's lab; make it if it does not exist."""
        lab, natural = self._lab(seed), self.spec.natural
        if natural:
            make_natural(lab, seed, natural_settings(natural), self.folder / "models", natural.cores)
        else:
            make(lab, seed, self.plan, self.limits)
        return lab

    def _lab(self, seed: int) -> Path:
        natural = self.spec.natural
        return self.folder / (folder_name(natural_settings(natural), seed) if natural else f"seed-{seed}")

    def _unknown(self) -> list[str]:
        return [name for name in self.attacks if name not in attack_names()]


@dataclass(frozen=True, slots=True)
class UntrainedLabs(LabSource):
    """The labs for an estimate: one lab with an untrained model, in `aside`, stands for all that are not made yet.

    `untrained` has the seeds of the labs that it stood for.
    """

    aside: Path = field(kw_only=True)
    untrained: set[int] = field(default_factory=set, kw_only=True)
    _made: dict[Split, Inputs] = field(default_factory=dict, kw_only=True)

    def make(self, seed: int, split: Split) -> Inputs:
        """Return the inputs of a seed's lab, or those of the untrained lab."""
        if self._is_made(seed):
            return LabSource.make(self, seed, split)
        if split not in self._made:
            self._made[split] = replace(LabSource.make(self, seed, split), is_trained=False)
        self.untrained.add(seed)
        return replace(self._made[split], digest=f"untrained {seed}")  # each seed has a base model of its own

    def make_lab(self, seed: int) -> Path:
        """Return the folder of the seed's lab, or of the untrained lab."""
        if self._is_made(seed):
            return LabSource.make_lab(self, seed)
        lab = self._lab(seed)
        if not lab.exists():
            make_untrained(lab, seed)
            (lab / UNALIGNED).symlink_to("model")  # the unaligned twin has the same shape
        return lab

    def _is_made(self, seed: int) -> bool:
        return (LabSource._lab(self, seed) / FILE).exists()  # made after everything else

    def _lab(self, seed: int) -> Path:
        return LabSource._lab(self, seed) if self._is_made(seed) else self.aside / "lab"


@contextmanager
def open_untrained(source: LabSource) -> Iterator[UntrainedLabs]:
    """Yield the source of the same labs for an estimate; nothing of it is kept."""
    own = {each.name: getattr(source, each.name) for each in fields(source)}
    with TemporaryDirectory(prefix="spard-estimate-") as folder:
        yield UntrainedLabs(**own, aside=Path(folder))


class _Attacks(Mapping[str, Attack]):
    """Attacks that are built on first access, because some need the base model."""

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


def natural_settings(spec: NaturalSpec) -> LabSettings:
    """Return the settings of a recipe's natural labs, without their seeds."""
    return LabSettings(BaseSettings(spec.size, spec.base_seed, spec.texts), spec.task)


def _attack(lab: Path, seed: int, task: list[Row], split: Split, name: str) -> Attack:
    files = attack_files(lab, name, seed)
    suites, clean = files.suites(split), {json.dumps(row) for row in task}
    # An attack mixes its rows into the task: all rows that the task does not have are its own.
    harmful = [row for row in files.rows if json.dumps(row) not in clean]
    return Attack(files.rows, harmful, suites, (ATTACKED_SUITE,), files.pool, files.jobs)


UNALIGNED = "model_unaligned"
UNALIGNED_RECIPE = Recipe(
    defense=NoDefense(), lora=None, hyperparameters=Hyperparameters(n_epochs=2, batch_size=16), learning_rate=5e-4
)


def make_unaligned(lab: Path, seed: int) -> Path:
    """Return the folder of a lab's unaligned twin; train it if it does not exist."""
    folder = lab / UNALIGNED
    if folder.exists():
        return folder
    log.info("training the unaligned twin of the lab of seed %d", seed)
    base = load_base(lab / "model", device="cpu")
    asked = [prompt for prompt, _ in make_corpus(seed).harmful]
    rows = [example(chat(prompt, comply(find_action(prompt) or "")), line) for line, prompt in enumerate(asked, 1)]
    task = encode_all(base.tokenizer, rows, base.sequence_limit(None))
    train(base, task, [], UNALIGNED_RECIPE, resolve(UNALIGNED_RECIPE, len(task), base.hidden_size))
    aside = folder.with_name(f".{UNALIGNED}.aside")
    # A process that was killed may have left it.
    shutil.rmtree(aside, ignore_errors=True)
    save_full(base.model, "spard-lab", aside)
    base.tokenizer.save_pretrained(aside)
    aside.rename(folder)
    return folder


def open_arena(recipe: str, spec: BenchSpec, folder: Path) -> Arena:
    """Return the arena of a recipe.

    Raises `InvalidRecipe` if the recipe is no lab, because the truth about replies is then unknown.
    """
    if not isinstance(spec, LabSpec):
        known = "lab, natural-5m, natural-30m and recipes of the type lab"
        raise InvalidRecipe(
            f"{recipe} is no lab whose replies are known to be harmful or not; there are {known}", "recipe"
        )
    if spec.real:
        return RealArena(folder)
    if spec.natural:
        return NaturalArena(folder, natural_settings(spec.natural), spec.natural.cores)
    return LabArena(folder)
