"""OpenAI's model object, and the provider's own: base models, safety pools, audit suites."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from app.catalog import model_names
from app.db.tables import Corpus
from app.http.schemas import Absent, Body, UnixTime
from spard.config import Quantizes
from spard.models.targets import MODULE

Embedder = Annotated[str, Field(min_length=1, max_length=1024)]
TargetModules = Annotated[list[Annotated[str, Field(pattern=MODULE)]], Field(min_length=1, max_length=64)]


class ModelOut(BaseModel):
    """A base model on offer, or a fine-tuned one of the caller's."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    # False: the server that answers cannot prove which weights it has loaded.
    attested: Annotated[Literal[False] | SkipJsonSchema[None], Absent] = None
    # The version of the audit that it stands on, if that is an earlier one.
    older_audit: Annotated[int | SkipJsonSchema[None], Absent] = None
    # The version of the last audit that was asked of it after its release, if there was one.
    later_audit: Annotated[int | SkipJsonSchema[None], Absent] = None


class ModelList(BaseModel):
    """All base models by alias, then your own fine-tuned models, oldest first."""

    object: Literal["list"] = "list"
    data: list[ModelOut]


class ModelRates(Body):
    """How fast a model was: tokens of replies and of rows a second, tokens of a reply, seconds to load it."""

    generated_per_s: Annotated[float, Field(gt=0, le=1e9)]
    reply_tokens: Annotated[float, Field(gt=0, le=1e6)]
    trained_per_s: Annotated[float, Field(gt=0, le=1e9)]
    load_s: Annotated[float, Field(ge=0, le=1e6)]


class BaseModelIn(Body):
    """A base model to offer: a local folder, or a hub id with the commit that is meant.

    `quantization` says when jobs train on it in NF4, 4 bits a weight: `if_needed` where no worker's GPUs hold it.
    `digest` is that of its files, as `spard check-model --json` prints it; a folder without one is read to find it out.
    `target_modules` are what adapters of jobs change that name none; without them it follows the model.
    `rates` is how fast it was when it was tried, which the first estimates rest on; `check-model --json` prints it.
    `embedder` is what jobs choose safe rows by that name none: `centered_states`, `states`, or a sentence encoder.
    """

    alias: Annotated[
        str,
        BeforeValidator(model_names.check_model_name),
        Field(pattern=model_names.PATTERN, max_length=model_names.LONGEST),
    ]
    source: Annotated[str, Field(min_length=1, max_length=1024)]
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = None
    learning_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    allow_full_fine_tuning: bool = False
    quantization: Quantizes = "never"
    digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")] | None = None
    target_modules: TargetModules | None = None
    rates: ModelRates | None = None
    embedder: Embedder | None = None


class LoraReach(BaseModel):
    """What an adapter of these target modules reaches: how many layers, and the share of the parameters in them.

    `leaves_out_experts`: the model has experts, and neither they nor their router are adapted.
    """

    target_modules: list[str]
    layers: int
    of_layers: int
    share: float
    leaves_out_experts: bool


class ToolSupport(BaseModel):
    """Whether a model's chat template renders the tools offered, the calls made, and what tools answer."""

    tools: bool
    tool_calls: bool
    tool: bool


class BaseModelOut(BaseModel):
    """`tool_support` and `lora_reach` are null where the model's files are not on the machine that serves the API.

    `digest` is of its files as they were when it was offered; null where they were not on that machine.
    """

    model_config = ConfigDict(from_attributes=True)

    object: Literal["base_model"] = "base_model"
    alias: str
    source: str
    revision: str | None
    learning_rate: float | None
    allow_full_fine_tuning: bool
    quantization: Quantizes
    tool_support: ToolSupport | None
    digest: str | None
    target_modules: list[str] | None
    lora_reach: LoraReach | None
    embedder: str | None
    created_at: UnixTime


class OfferedModelOut(BaseModelOut):
    """The answer to an offer; `warnings` are what keeps jobs on the model from ending in an adapter."""

    warnings: list[str] = []


class TemplateProbe(BaseModel):
    """A conversation as it is trained: in how many samples, and as text with what is learned in brackets.

    Samples are parted by a line of three dashes. `refusal` says why such rows are not trained.
    """

    name: str
    samples: int
    text: str
    refusal: str


class TemplateCardOut(BaseModel):
    """What a model's chat template does to conversations, in sentences and by example."""

    lines: list[str]
    probes: list[TemplateProbe]


class ModelFitness(BaseModel):
    """What a base model's files have; null is what its files on this machine do not tell.

    `fault` is the first thing that keeps jobs from it.
    """

    object: Literal["base_model.fitness"] = "base_model.fitness"
    alias: str
    parameters: int | None
    weights: bool | None = None
    tokenizer: bool | None = None
    chat_template: bool | None = None
    end_token: bool | None = None
    fault: str | None = None
    template: TemplateCardOut | None = None


class BaseModelDeleted(BaseModel):
    """Confirms that a base model is no longer offered."""

    id: str
    object: Literal["base_model"] = "base_model"
    deleted: Literal[True] = True


class BaseModelList(BaseModel):
    """Every base model on offer, by alias."""

    object: Literal["list"] = "list"
    data: list[BaseModelOut]


class CorpusOut(BaseModel):
    """One version of a safety pool or an audit suite; `rows` is what jobs see.

    `warnings` are in the answer to an import: what keeps jobs from being measured with it.
    """

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["corpus"] = "corpus"
    kind: str
    name: str
    version: int
    rows: int
    bytes: int
    sha256: str
    created_at: UnixTime
    warnings: list[str] = []


class Embedded(BaseModel):
    """A base model that a job has embedded a pool for.

    The vectors are in the cache of the worker that ran the job, which may be emptied; another worker makes its own.
    """

    model: str
    source: str
    revision: str | None
    latest_at: UnixTime


class PoolOut(CorpusOut):
    """`held_out` prompts are never selected: they attack the adapter when the provider has no harmful suite.

    `embedded_for` is by the jobs that have succeeded with this version and were not erased.
    """

    held_out: int
    embedded_for: list[Embedded]

    @classmethod
    def from_pool(cls, pool: Corpus, held_out: int, embedded_for: list[Embedded]) -> Self:
        """Build the answer from a stored pool and what was counted of it."""
        columns = {name: getattr(pool, name) for name in CorpusOut.model_fields if hasattr(pool, name)}
        return cls(**columns, held_out=held_out, embedded_for=embedded_for)


class CorpusDeleted(BaseModel):
    """Confirms that a version of a safety pool or an audit suite is gone."""

    id: str
    object: Literal["corpus"] = "corpus"
    deleted: Literal[True] = True


class PoolList(BaseModel):
    """Every version of every safety pool, newest first."""

    object: Literal["list"] = "list"
    data: list[PoolOut]


class SuiteList(BaseModel):
    """Every version of every audit suite, newest first."""

    object: Literal["list"] = "list"
    data: list[CorpusOut]
