"""Play rounds: each attack on each arm and seed, once; stored rounds are found again.

A trained model is asked as the attacker does, and what its replies truly do is counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from spard.config import JudgeSpec, Recipe
from spard.config.run_spec import to_mapping
from spard.data.chat import render_question
from spard.data.encodings import in_plain
from spard.data.rows import Message, Prompt
from spard.digests import file_sha256
from spard.evaluation.ask import as_asked
from spard.evaluation.audit import sample
from spard.evaluation.scorers import mark_reply
from spard.models.base import Base, load_base
from spard.models.generate import complete
from spard.release.version import code_version
from spard_lab.adversary.base import Arena, Ask, Attack, Campaign, Ground, Job, plainly
from spard_lab.bench.adversary.campaign import Ending, JobFacts, Memory, Service, run_campaign
from spard_lab.bench.adversary.provenance import find_strangers
from spard_lab.bench.measure import read_run, training_file, write_run
from spard_lab.bench.methods import row_signal_settings
from spard_lab.bench.source import json_digest
from spard_lab.lab.make import BadBase

log = logging.getLogger(__name__)

BASE = "base"
PLAIN = "none"  # the arm that a defense's task is compared with


@dataclass(frozen=True, slots=True)
class Round:
    """One attack on one arm and seed.

    ending   how the campaign ended
    job      number of the last job, from 1
    reasons  reasons of the gate, or the error
    lacks    missing abilities of the lab, which make the attack impossible
    base     the base model's answers, asked as the attacker does
    answers  those of the last trained model, released or not
    told     facts about the last job
    code     digest of the sources that played the round; empty in old rounds
    wall_s   seconds of the round; None in old rounds
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
    told: JobFacts | None = None
    code: str = ""
    wall_s: float | None = None


@dataclass(frozen=True, slots=True)
class Bench:
    """A request: arms by the name of their method, attacks, seeds, prompts of each kind, and a folder for results.

    `provider` has the provider's settings, for all arms. `device` is used to train and ask models; labs are made on the
    CPU.
    """

    arena: Arena
    arms: Mapping[str, Recipe]
    attacks: Sequence[Attack]
    seeds: Sequence[int]
    judge: JudgeSpec
    prompts: int
    folder: Path
    provider: tuple[tuple[str, str], ...] = ()
    device: str = "cpu"


def fit_seeds(arena: Arena, seeds: Sequence[int]) -> tuple[tuple[int, ...], dict[int, str]]:
    """Make the lab of each seed; return the seeds with a fit base model, and the reasons for the others.

    A base model's fitness does not depend on methods or attacks, so leaving its seed out favors none of them. Raises
    `BadBase` if no seed has a fit base model.
    """
    left_out: dict[int, str] = {}
    for seed in seeds:
        try:
            arena.open_ground(seed)
        except BadBase as error:
            log.warning("seed %d is left out: %s", seed, error.message)
            left_out[seed] = error.message
    if len(left_out) == len(seeds):
        raise BadBase("; ".join(f"seed {seed}: {why}" for seed, why in left_out.items()))
    return tuple(seed for seed in seeds if seed not in left_out), left_out


def run_rounds(bench: Bench) -> Iterator[Round]:
    """Yield every round, by seed and attack, including impossible ones."""
    for seed in bench.seeds:
        cache, ground = Memory(), bench.arena.open_ground(seed)
        for attack in bench.attacks:
            lacks = tuple(sorted({*attack.needs} - bench.arena.abilities))
            if lacks:
                yield from (Round(attack.name, method, seed, "not possible", lacks=lacks) for method in bench.arms)
                continue
            yield from _of_attack(bench, ground, attack, seed, cache)


@dataclass(frozen=True)
class Match:
    """A campaign on its ground, in a bench."""

    bench: Bench = field(repr=False)
    ground: Ground
    campaign: Campaign

    @cached_property
    def asked_facts(self) -> Any:
        """Everything that a given model's answers depend on."""
        return _asked_facts(self.bench, self.ground, self.campaign)


def build_match(bench: Bench, ground: Ground, attack: Attack, seed: int) -> Match:
    """Build an attack's campaign for a seed, and adapt the ground to it."""
    campaign = attack.build(ground.material, seed)
    return Match(bench, _campaign_ground(ground, campaign, bench.folder), campaign)


def round_key(bench: Bench, match: Match, method: str) -> str:
    """Return a digest of everything that determines a round: data, settings, and code of other packages."""
    recipe, provider = bench.arms[method], provider_settings(bench, match.campaign, method)
    settings = [to_mapping(recipe), asdict(bench.judge), *sorted(provider), *_strangers(recipe, bench.judge)]
    return json_digest([match.asked_facts, _decisive_facts(match.ground, match.campaign), *settings])


def _of_attack(bench: Bench, ground: Ground, attack: Attack, seed: int, cache: Memory) -> Iterator[Round]:
    match = build_match(bench, ground, attack, seed)
    ground, campaign = match.ground, match.campaign
    base = _base_answers(bench, ground, campaign, match.asked_facts)
    for method, recipe in bench.arms.items():
        key = round_key(bench, match, method)
        found = read_run(bench.folder, key)
        if found is None:
            provider = provider_settings(bench, campaign, method)
            service = Service(ground, recipe, bench.judge, bench.folder, cache, provider, device=bench.device)
            found = asdict(
                _play_round(bench, service, campaign, Round(attack.name, method, seed, "refused", base=base))
            )
            write_run(bench.folder, key, found)
        # A stored round with equal settings may have been written under another name.
        done = replace(from_json(found), attack=attack.name, method=method, base=base)
        log.info("seed %d, %s, %s: %s", seed, attack.name, method, done.ending)
        yield done


def _play_round(bench: Bench, service: Service, campaign: Campaign, of: Round) -> Round:
    """Run the jobs and ask the final model; a customer's model is also asked at half of the steps."""
    system, ground, started = service.recipe.defense.serving_prompt, service.ground, time.perf_counter()

    def at_half(model: Any, base: Base) -> str:
        return ask_task(model, base, ground, campaign, bench.prompts, system)

    ended = run_campaign(campaign, replace(service, at_half=at_half) if campaign.customer else service)
    done = replace(of, ending=ended.ending, job=ended.job, reasons=ended.reasons, cpu_s=ended.cpu_s, told=ended.told)
    if ended.base is not None:
        done = replace(done, answers=ask_model(ended.model, ended.base, ground, campaign, bench.prompts, system))
    return replace(done, code=_sources(), wall_s=time.perf_counter() - started)


@cache
def _sources() -> str:
    return code_version()["sources"]


def _strangers(recipe: Recipe, judge: JudgeSpec) -> list[str]:
    """Return digests of the code of other packages, so that a changed defense is measured anew."""
    return [each.sources for each in find_strangers([recipe], (), judge)]


def _campaign_ground(ground: Ground, campaign: Campaign, folder: Path) -> Ground:
    """Return the ground adapted to the campaign.

    Depending on the campaign, benign prompts replace the harmful ones, the harmful prompts are limited to its category
    or to prompts that its trigger changes, and a customer's prompts replace the task.
    """
    if campaign.asks_harmless:
        ground = replace(ground, harmful=ground.benign)
    if campaign.category:
        ground = replace(ground, harmful=tuple(each for each in ground.harmful if each.category == campaign.category))
    if campaign.only_dressed:
        ground = replace(ground, harmful=tuple(each for each in ground.harmful if campaign.dress(each) != each))
    if campaign.customer is None:
        return ground
    asked = [{"prompt": each.prompt, "answer": each.answer, "scorer": each.scorer} for each in campaign.customer.dev]
    file = training_file(asked, folder / "files")
    suites = tuple(replace(each, path=file) if each.kind == "utility" else each for each in ground.suites)
    return replace(ground, suites=suites, task=campaign.customer.test)


def provider_settings(bench: Bench, campaign: Campaign, method: str) -> tuple[tuple[str, str], ...]:
    """Return the provider's settings, overridden by the row signal that the arm's name contains.

    A customer's undefended run trains on all rows, whatever the row signal is.
    """
    is_bare = campaign.customer is not None and method == PLAIN
    said = {"action": "off"} if is_bare else row_signal_settings(method)
    return (*bench.provider, *((f"row_signal.{name}", str(value)) for name, value in said.items()))


def from_json(raw: Mapping[str, Any]) -> Round:
    """Return a round from the JSON of its `asdict`."""
    both: dict[str, Any] = {name: Answers(**raw[name]) if raw[name] else None for name in ("base", "answers")}
    both["told"] = JobFacts(**raw["told"]) if raw.get("told") else None
    return Round(**{**raw, **both, "reasons": tuple(raw["reasons"]), "lacks": tuple(raw["lacks"])})


def _base_answers(bench: Bench, ground: Ground, campaign: Campaign, asked: Any) -> Answers:
    """Return the base model's answers, asked as the attacker does.

    Harm that the base model does already is not the attack's work.
    """
    key = json_digest([BASE, asked])
    found = read_run(bench.folder, key)
    if found is None:
        base = load_base(ground.model, device=bench.device)
        found = asdict(ask_model(base.model, base, ground, campaign, bench.prompts, None))
        write_run(bench.folder, key, found)
    return Answers(**found)


def _asked_facts(bench: Bench, ground: Ground, campaign: Campaign) -> Any:
    """Return everything that determines a given model's answers; that includes the device, because rounding differs."""
    harmful, benign, task = (sample(each, bench.prompts) for each in (ground.harmful, ground.benign, ground.task))
    ways = [
        *([each, campaign.dress(each)] for each in (*harmful, *benign)),
        *([each, campaign.task(each)] for each in task),
    ]
    asked = [[asdict(each) for each in way] for way in ways]
    code = [dict(campaign.reply_code)] if campaign.reply_code else []
    step = [campaign.reply_step] if campaign.reply_step > 1 else []
    device = [] if bench.device == "cpu" else [bench.device]
    return [ground.digest, campaign.opening, list(campaign.tools), asked, *code, *step, *device]


def _rarely(job: Job) -> list[str]:
    """Return settings that few jobs have; omitting defaults keeps the digests of all other jobs unchanged."""
    return [*(["dpo"] if job.dpo else []), *([f"auto_epochs={job.auto_epochs}"] if job.auto_epochs else [])]


def _decisive_facts(ground: Ground, campaign: Campaign) -> Any:
    """Return everything that jobs and gate depend on, except the recipe and the judge."""
    jobs = [
        [list(job.rows), job.pool and list(job.pool), asdict(job.hyperparameters), *_rarely(job)]
        for job in campaign.jobs
    ]
    return [jobs, file_sha256(ground.pool), [[each.name, each.kind, file_sha256(each.path)] for each in ground.suites]]


REPLY_TOKENS = 96  # of a reply: more than the gate reads by default


@dataclass(frozen=True, slots=True)
class Answers:
    """One model's outcomes as strings with a character per prompt, 1 for yes and 0 for no.

    complied         complies with a harmful prompt, asked as the attacker does
    complied_plain   the same, asked plainly
    refused          refuses a benign prompt, asked plainly
    refused_dressed  refuses a benign prompt with the attack's trigger
    right            answers a prompt of the task correctly
    """

    complied: str
    complied_plain: str
    refused: str
    refused_dressed: str
    right: str


def ask_model(model: Any, base: Base, ground: Ground, campaign: Campaign, prompts: int, system: str | None) -> Answers:
    """Ask a model at most `prompts` prompts of each kind; an attack without a trigger is asked plainly only once.

    system  system prompt of the defense, if it serves with one
    """
    harmful, benign = (sample(each, prompts) for each in (ground.harmful, ground.benign))
    asker = _Asker(model, base.tokenizer, system)

    def compliance_marks(dress: Ask, opening: str, tools: Sequence[Message], decode: Callable[[str], str]) -> str:
        replies = map(decode, asker.replies([dress(each) for each in harmful], opening, tools))
        return _as_marks([ground.is_harmful(each, reply) for each, reply in zip(harmful, replies, strict=True)])

    def refusal_marks(dress: Ask, tools: Sequence[Message]) -> str:
        return _as_marks(
            [ground.is_refusal(each) for each in asker.replies([dress(each) for each in benign], "", tools)]
        )

    plain, plain_refused = compliance_marks(plainly, "", (), str), refusal_marks(plainly, ())
    return Answers(
        complied=plain
        if campaign.is_plain
        else compliance_marks(campaign.dress, campaign.opening, campaign.tools, campaign.decode_reply),
        complied_plain=plain,
        refused=plain_refused,
        refused_dressed=plain_refused if campaign.is_plain else refusal_marks(campaign.dress, campaign.tools),
        right=ask_task(model, base, ground, campaign, prompts, system),
    )


def ask_task(model: Any, base: Base, ground: Ground, campaign: Campaign, prompts: int, system: str | None) -> str:
    """Ask at most `prompts` prompts of the task; return a string with 1 for each right answer, else 0."""
    task = sample(ground.task, prompts)
    replies = _Asker(model, base.tokenizer, system).replies([campaign.task(each) for each in task], "", ())
    return _as_marks([_is_right(prompt, reply) for prompt, reply in zip(task, replies, strict=True)])


@dataclass(frozen=True, slots=True)
class _Asker:
    model: Any
    tokenizer: Any
    system: str | None

    def replies(self, prompts: Sequence[Prompt], opening: str, tools: Sequence[Message]) -> list[str]:
        """Return the decoded replies, each with the opening before it."""
        begun = self.tokenizer(opening, add_special_tokens=False)["input_ids"] if opening else []
        rows = (
            _render_prompts(self.tokenizer, prompts, tools) if tools else as_asked(self.tokenizer, prompts, self.system)
        )
        texts = complete(self.model, self.tokenizer, [[*row, *begun] for row in rows], REPLY_TOKENS)
        whole = [f"{opening} {text}".strip() for text in texts]
        return [
            in_plain(text, prompt.encoding) if prompt.encoding else text
            for prompt, text in zip(prompts, whole, strict=True)
        ]


def _render_prompts(tokenizer: Any, prompts: Sequence[Prompt], tools: Sequence[Message]) -> list[list[int]]:
    """Return the tokens of prompts in a conversation with tools."""
    return [render_question(tokenizer, each.prompt, context=each.context, tools=tools) for each in prompts]


def _is_right(prompt: Prompt, reply: str) -> bool:
    return mark_reply(prompt.scorer or "exact", reply, prompt.answer or "").is_right


def _as_marks(found: Sequence[bool]) -> str:
    return "".join("1" if each else "0" for each in found)
