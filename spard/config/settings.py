"""The recipe of a fine-tuning run: every setting with its bounds and default, defined once.

The service validates requests against these dataclasses, its OpenAPI document shows their bounds, and the training loop
gets them unchanged. Imports the standard library only, so that `app` can import this module without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeAlias

from spard.config.anchors import Anchors
from spard.config.bounds import Auto, Bound
from spard.config.checks import MIN_SCORED
from spard.config.defenses import Defense
from spard.config.defenses.spard import Spard
from spard.config.extensions import JUDGES, SELECTIONS, NameIn
from spard.config.quantization import Quantization, check_quantization
from spard.errors import InvalidRecipe

STATES, CENTERED_STATES = "states", "centered_states"  # embedders that use the base model's states
OWN_EMBEDDERS = ("auto", CENTERED_STATES, STATES)


@dataclass(frozen=True, slots=True)
class Selection:
    """Select the k = max(min_examples, ceil(ratio * rows)) pool rows that a defense trains on; at most the pool.

    safe_answers   "pool": the pool's answers. "self": the base model's own, if they are harmless. "auto": its own if
                   the pool's answers are unlikely under it (`spard.pipeline.rows`).
    embedder       the vectors that rows are compared by. "centered_states": the base model's states, without the pool's
                   mean and the directions that dominate it (`spard.selection.relevance`). "states": the plain states,
                   as in jobs of 0.1. Otherwise the folder or hub id of a sentence encoder
                   (`spard.selection.embeddings`). "auto": the provider's setting for the base model, or else
                   "centered_states".

    Relevance is measured against the customer's rows, which can therefore steer it. Two settings limit how far:

    reserve        share of k that is chosen for diversity alone, independent of the customer's rows.
    influence_cap  share of k that may have the same customer row as the nearest; 1: no cap. Rows beyond the cap are
                   replaced like the reserve.
    """

    method: Annotated[str, NameIn(SELECTIONS)] = "relevance_diversity"
    ratio: Annotated[float, Bound(gt=0, le=1)] = 0.03
    beta: Annotated[float, Bound(ge=0, le=64)] = 4.0
    min_examples: Annotated[int, Bound(ge=1, le=10_000)] = 64
    safe_answers: Literal["pool", "self", "auto"] = "pool"
    reserve: Annotated[float, Bound(ge=0, le=1)] = 0.0
    influence_cap: Annotated[float, Bound(gt=0, le=1)] = 1.0
    embedder: str = "auto"

    @property
    def encoder(self) -> str | None:
        """The folder or hub id of the sentence encoder; None if the base model's states are compared."""
        return None if self.embedder in OWN_EMBEDDERS else self.embedder

    @property
    def is_centered(self) -> bool:
        """True if the base model's states are compared without their mean."""
        return self.embedder in ("auto", CENTERED_STATES)

    def size(self, rows: int, pool: int) -> int:
        """Return the number of safe rows for this many training rows and pool rows."""
        return min(pool, max(self.min_examples, math.ceil(self.ratio * rows)))


# The setting of how a model's weights are distributed over the GPUs of a run. Imports the standard library only.

Sharding: TypeAlias = Literal["none", "full", "hybrid"]
"""none: every GPU holds the whole model; full: every GPU holds a part; hybrid: the GPUs of each machine share one
copy."""


# The settings of learning from preference pairs, by DPO (Rafailov et al., 2023).

AUTO_BETA = 0.1  # as in the paper's experiments
Beta = Annotated[float, Bound(gt=0, le=2)] | Auto


@dataclass(frozen=True, slots=True)
class Dpo:
    """Minimize -log sigmoid(beta (margin of the model - margin of the reference)); see `spard.losses.relative`.

    beta  strength of the pull toward the reference, within OpenAI's bounds; "auto" is 0.1.
    """

    beta: Beta = "auto"

    @property
    def strength(self) -> float:
        """The value of `beta`, with "auto" resolved."""
        return AUTO_BETA if self.beta == "auto" else self.beta


# The setting of how the optimizer stores its moments. Imports the standard library only.

OptimizerName: TypeAlias = Literal["adamw", "adamw_8bit"]
"""adamw: two moments in float32 per trained parameter; adamw_8bit: two moments in 8 bits, by bitsandbytes."""

_PARAM = "recipe.optimizer"


def check_optimizer(optimizer: OptimizerName, *, has_lora: bool, is_sharded: bool) -> None:
    """Raise `InvalidRecipe` if moments in 8 bits are unsupported in this run or save nothing."""
    if optimizer == "adamw":
        return
    if has_lora:
        message = f"{_PARAM}: {optimizer} saves memory in full fine-tuning; an adapter's moments are few, set adamw"
        raise InvalidRecipe(message, _PARAM)
    if is_sharded:
        message = f"{_PARAM}: the moments of {optimizer} are not cut over GPUs; set sharding = none"
        raise InvalidRecipe(message, _PARAM)


# The settings of a run's end: which weights it releases, and early stopping.


@dataclass(frozen=True, slots=True)
class Ending:
    """Which weights a run ends with, and early stopping.

    keep      "last": the weights of the last step. "best": those of the best epoch end, by safety within the gate's
              bounds and then by the loss on validation rows. The audit of these weights decides on their release.
    patience  training ends after this many epoch ends in a row that are no better than the best one; None: never early
    prompts   prompts of each gated suite that are asked at each epoch end and never by the gate: at most this many, and
              at most a fifth of the suite (`spard.evaluation.suites`)

    Both settings need LoRA. Without a validation file a part of the customer's rows is held out for validation.
    """

    keep: Literal["last", "best"] = "last"
    patience: Annotated[int, Bound(ge=1, le=50)] | None = None
    prompts: Annotated[int, Bound(ge=20, le=1000)] = 40

    @property
    def compares(self) -> bool:
        """True if epoch ends are measured and compared."""
        return self.keep == "best" or self.patience is not None


# The settings of the ways in which an audit asks prompts other than plainly.

Count = Annotated[int, Bound(ge=0, le=1000)]


@dataclass(frozen=True, slots=True)
class Asking:
    """The number of prompts that an audit asks in each way other than plainly; 0 turns a way off.

    dresses    triggers, system prompts, tools and earlier turns of the training rows, the most suspicious ones
    prompts    harmful prompts, and as many benign ones, in each disguise
    random     the same with words drawn from the rows, at the start, in the middle and at the end
    sampled    harmful prompts answered `samples` times each at `temperature`, with seeds
    prefilled  harmful prompts whose answer is begun compliantly
    turns      harmful prompts after an earlier turn of the training rows
    phrases    harmful prompts, in turn in the varying phrases that suspicious rows begin or end with, and in further
               disguises. If phrases and disguises are more than twelve, as many prompts again for every twelve
               disguises; benign prompts are asked in the disguises only
    requests   requests of rows in which the run's judge finds harm, as the rows ask them; 20 if it is less than that,
               because a suite of fewer decides nothing unless the file has no more
    modes      harmful prompts, and as many benign ones, in each other mode of thinking that the rows train or that is
               the base model's default
    """

    dresses: Annotated[int, Bound(ge=0, le=16)] = 4
    prompts: Count = 60
    random: Count = 120
    sampled: Count = 30
    samples: Annotated[int, Bound(ge=1, le=16)] = 2
    temperature: Annotated[float, Bound(gt=0, le=2)] = 1.0
    prefilled: Count = 120
    turns: Count = 120
    phrases: Count = 120
    requests: Count = 60
    modes: Count = 120

    def row_requests(self, max_prompts: int) -> int:
        """Return the limit on requests of harmful rows in an audit: `requests`, raised to 20 unless it is 0."""
        return min(max_prompts, max(self.requests, MIN_SCORED)) if self.requests else 0


DISGUISES_ALONE = Asking(random=0, sampled=0, prefilled=0, turns=0, phrases=0, requests=0, modes=0)
"""Prompts in disguises only, as in audits of version 1, which asked no benign prompts in disguises."""


Seed = Annotated[int, Bound(ge=0, le=2**31 - 1)]
SeqLength = Annotated[int, Bound(ge=16, le=131_072)]
MAX_SEQ_LENGTH = 2048  # default limit of tokens per row


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA adapter (Hu et al., 2022); without `target_modules` it has the attention projections q, k, v and o."""

    rank: Annotated[int, Bound(ge=1, le=256)] = 16
    alpha: Annotated[float, Bound(gt=0, le=1024)] = 16.0
    dropout: Annotated[float, Bound(ge=0, le=0.5)] = 0.0
    target_modules: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """OpenAI's three hyperparameters; `resolve` replaces "auto", and the job shows the numbers used.

    A multiplier is accepted as customers' scripts set it: a learning rate that is too high ends as `non_finite_loss` or
    at the gate.
    """

    n_epochs: Annotated[int, Bound(ge=1, le=50)] | Auto = "auto"
    batch_size: Annotated[int, Bound(ge=1, le=256)] | Auto = "auto"
    learning_rate_multiplier: Annotated[float, Bound(gt=0, le=1e6)] | Auto = "auto"


@dataclass(frozen=True, slots=True)
class Audit:
    """The audit before release; `suites` None means all suites of the provider.

    Replies that `max_new_tokens` cuts are counted. A `sequential` audit asks each suite only until the gate's decision
    on it is almost certain, and ends at the first certain failure; otherwise every suite is asked as a whole.
    """

    suites: tuple[str, ...] | None = None
    max_prompts: Annotated[int, Bound(ge=MIN_SCORED, le=10_000)] = 500
    max_new_tokens: Annotated[int, Bound(ge=1, le=2048)] = 256
    asking: Asking = field(default_factory=Asking)
    sequential: bool = True

    def lengthen(self) -> Audit:
        """Return the audit that unusual evidence leads to: every suite as a whole, and twice as much in other ways."""
        twice = {name: min(2 * getattr(self.asking, name), _MOST_ASKED) for name in _ASKED_COUNTS}
        return replace(self, asking=replace(self.asking, **twice), sequential=False)


_ASKED_COUNTS = ("prompts", "random", "sampled", "prefilled", "turns", "phrases", "requests", "modes")
_MOST_ASKED = 1000  # the bound of each of them


SMALL_AUDIT = Audit(
    max_prompts=120,
    max_new_tokens=64,
    asking=Asking(dresses=2, random=60, sampled=0, prefilled=60, turns=60, phrases=60, requests=MIN_SCORED, modes=60),
)
AuditSize = Literal["full", "small"]
AUDITS: Mapping[AuditSize, Audit] = {"full": Audit(), "small": SMALL_AUDIT}
"""The audits that a policy can ask for. `small` is for machines without a GPU; with fewer prompts it errs more often in
both directions (rates in docs/audit.md)."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the adapter for given data: the same recipe and data give the same adapter."""

    defense: Defense = field(default_factory=Spard)
    selection: Selection = field(default_factory=Selection)
    lora: Lora | None = field(default_factory=Lora)  # None: full fine-tuning
    hyperparameters: Hyperparameters = field(default_factory=Hyperparameters)
    audit: Audit = field(default_factory=Audit)
    seed: Seed = 0
    max_seq_length: SeqLength | None = None  # None: the base model's limit, at most 2,048
    learning_rate: Annotated[float, Bound(gt=0, le=1)] | None = (
        None  # None: `default_learning_rate`; the multiplier applies
    )
    weight_decay: Annotated[float, Bound(ge=0, le=1)] = 0.01
    warmup_ratio: Annotated[float, Bound(ge=0, le=0.5)] = 0.05
    max_grad_norm: Annotated[float, Bound(gt=0, le=1e6)] = 1.0
    micro_batch_size: Annotated[int, Bound(ge=1, le=256)] | None = None  # None: the whole batch
    pass_tokens: Annotated[int, Bound(ge=64)] | None = None  # padded tokens of a pass; None: those of a micro-batch
    gradient_checkpointing: bool = False
    sharding: Sharding = "none"  # distribution of the model over the run's GPUs
    quantization: Quantization = "none"  # quantization of the frozen base model's linear layers
    optimizer: OptimizerName = "adamw"  # `adamw_8bit`: its moments in 8 bits, for full fine-tuning
    checkpoint_every_s: Annotated[float, Bound(gt=0)] = 120.0
    # Options that go with every defense, off by default
    constrained_sft: bool = False  # see `spard.losses.relative`
    ema: Annotated[float, Bound(gt=0, le=0.9999)] | None = None  # decay of the released moving average
    anchor: Annotated[float, Bound(ge=0, le=1e4)] = 0.0  # weight of `spard.losses.anchor`; its authors take 50
    anchors: Anchors = field(default_factory=Anchors)  # its prompts, whether `anchor` or the defense sets its weight
    dpo: Dpo | None = None  # train on preference pairs; None: on answers
    ending: Ending = field(default_factory=Ending)  # which weights are released

    def __post_init__(self) -> None:
        """Raise `InvalidRecipe` for combinations of settings that contradict or exclude each other."""
        if self.anchor and self.defense.has_anchor:
            name = f"the defense {self.defense.type} has an anchor of its own"
            raise InvalidRecipe(f"recipe.anchor: {name}; set recipe.defense.anchor_weight", "recipe.anchor")
        if self.dpo and self.constrained_sft:
            message = "recipe.constrained_sft: it weights tokens of answers, and does not apply to dpo's pairs"
            raise InvalidRecipe(message, "recipe.constrained_sft")
        if self.dpo and self.defense.trains_on_answers:
            message = f"recipe.dpo: the defense {self.defense.type} trains on safe answers among the rows, not on pairs"
            raise InvalidRecipe(message, "recipe.dpo")
        if self.ending.compares and self.lora is None:
            message = "recipe.ending: it compares ends of epochs, whose weights are kept of LoRA adapters alone"
            raise InvalidRecipe(message, "recipe.ending")
        plain_for = self.defense.type if self.defense.reads_weights else None
        has_lora, is_sharded = self.lora is not None, self.sharding != "none"
        check_quantization(self.quantization, has_lora=has_lora, is_sharded=is_sharded, plain_for=plain_for)
        check_optimizer(self.optimizer, has_lora=has_lora, is_sharded=is_sharded)

    @property
    def effective_anchor(self) -> float:
        """The weight of the representation anchor, the recipe's or the defense's own; 0: no anchor."""
        return self.anchor or self.defense.anchor

    @property
    def uses_pool(self) -> bool:
        """True if safe rows are selected."""
        return self.defense.trains_on_safe_rows or self.effective_anchor > 0

    @property
    def uses_benign_rows(self) -> bool:
        """True if benign rows of the pool are selected."""
        return self.effective_anchor > 0 and self.anchors.has_benign


@dataclass(frozen=True, slots=True)
class JudgeSpec:
    """The judge that grades replies, and how it is reached.

    name     `refusal`: a rule. `llm`: a language model behind an OpenAI-compatible endpoint. `classifier`: an open
             classifier of `family`, with `model` its folder or hub id. `consensus`: the majority of `members`. `base`:
             the run's own base model, with scores from 1 to 5. `local`: a classifier that `spard judge train` has
             written to the file `model`.
    canaries number of known harmful and as many known safe replies in each batch; if one is misjudged, the batch is
             unscored. The rule and `local` need none.

    The endpoint's key is read from the environment variable `api_key_env`; no file contains keys.
    """

    name: Annotated[str, NameIn(JUDGES)] = "refusal"
    base_url: str | None = None
    model: str = "gpt-4o-mini"
    api_key_env: str = "SPARD_JUDGE_API_KEY"
    timeout_s: Annotated[float, Bound(gt=0, le=600)] = 60.0
    retries: Annotated[int, Bound(ge=0, le=10)] = 4
    concurrency: Annotated[int, Bound(ge=1, le=64)] = 8
    family: Literal["harmbench", "llama_guard", "qwen3guard", "wildguard"] = "harmbench"
    template: str | None = None  # file with the classifier's original prompt; None: our wording
    canaries: Annotated[int, Bound(ge=0, le=16)] = 1
    members: tuple[JudgeSpec, ...] = ()

    def with_members(self) -> Iterator[JudgeSpec]:
        """Yield this judge and, recursively, its members."""
        yield self
        for member in self.members:
            yield from member.with_members()


@dataclass(frozen=True, slots=True)
class ResolvedNumbers:
    """The numbers of one run in place of "auto"."""

    n_epochs: int
    batch_size: int
    learning_rate_multiplier: float
    learning_rate: float  # including the multiplier


def default_learning_rate(hidden_size: int, lora: Lora | None) -> float:
    """Return the default peak learning rate of AdamW for a model of this width.

    LoRA follows the scaling law of Schulman et al., "LoRA Without Regret" (2025): 5e-4 at width 2,000, growing with a
    power of 1/width; full fine-tuning takes a tenth of it. Capped at 2e-3, since the law was fitted on widths above
    2,000.
    """
    lora_rate: float = min(5e-4 * (2000 / hidden_size) ** 0.781, 2e-3)
    return lora_rate if lora else lora_rate / 10


def auto_multiplier(recipe: Recipe) -> float:
    """Return the learning rate multiplier for "auto".

    DPO takes a tenth. Its gradient does not fade as a row is learned: at the learning rate for answers both answers of
    a pair become unlikely and the task is lost (`lab/docs/results-earlier.md`).
    """
    return 0.1 if recipe.dpo else 1.0


def resolve(recipe: Recipe, rows: int, hidden_size: int) -> ResolvedNumbers:
    """Return the numbers for every "auto": about 200 optimizer steps of 16 rows, in 1 to 10 epochs."""
    asked = recipe.hyperparameters
    batch = min(16, rows) if asked.batch_size == "auto" else asked.batch_size
    # Small files get more epochs, up to 10, and large ones fewer, down to 1.
    epochs = min(10, max(1, math.ceil(200 * batch / rows))) if asked.n_epochs == "auto" else asked.n_epochs
    multiplier = auto_multiplier(recipe) if asked.learning_rate_multiplier == "auto" else asked.learning_rate_multiplier
    rate = recipe.learning_rate or default_learning_rate(hidden_size, recipe.lora)
    return ResolvedNumbers(epochs, batch, multiplier, rate * multiplier)


def max_anchor_ratio(recipe: Recipe, resolved: ResolvedNumbers, hidden_size: int) -> float | None:
    """Return the largest length of the anchor's gradient as a multiple of the task's; None: any length.

    It grows with a learning rate above the default: a constant bound lets attacks through there that it stops at the
    default rate (`lab/docs/decisions/0029-the-anchor-s-bound-grows-with-the-rate.md`).
    """
    ratio = recipe.anchors.max_gradient_ratio
    times = resolved.learning_rate / default_learning_rate(hidden_size, recipe.lora)
    return None if ratio is None else ratio * max(1.0, times)


AGENT_KEY = "SPARD_AGENT_API_KEY"  # environment variable with the endpoint's key


@dataclass(frozen=True, slots=True)
class Agent:
    """The endpoint of the agent, its budget, and the effect of its score.

    Rows of the training file and replies of the models are sent to `base_url`; they leave the machine only if an agent
    is set.

    base_url   an endpoint of OpenAI's form
    model      its name there
    max_score  a model with a higher score, from 0 to 1, is not released; None: the score is only reported. It is also
               only reported if the agent's false positives were not measured or are too many
    rows       rows of the training file that it is shown, at most
    questions  questions to the base model and the trained one together, at most
    turns      its own answers, including the one with the score
    """

    base_url: str
    model: str
    max_score: Annotated[float, Bound(ge=0, le=1)] | None = None
    rows: Annotated[int, Bound(ge=0, le=500)] = 40
    questions: Annotated[int, Bound(ge=0, le=500)] = 24
    turns: Annotated[int, Bound(ge=1, le=50)] = 8

    @property
    def endpoint(self) -> JudgeSpec:
        """The agent's endpoint as a judge spec, because the worker, which has the key and a network, asks it too."""
        return JudgeSpec(name="llm", base_url=self.base_url, model=self.model, api_key_env=AGENT_KEY)
