"""API objects of the catalog: OpenAI's model object, and the provider's base models, safety pools and suites."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
)
from pydantic.json_schema import SkipJsonSchema

from app.db.tables import Corpus
from app.http.schemas import Absent, Body, Refusal, UnixTime
from spard.config import Quantizes
from spard.data.template_arguments import value_fault
from spard.models.targets import MODULE

Embedder = Annotated[str, Field(min_length=1, max_length=1024)]
TargetModules = Annotated[list[Annotated[str, Field(pattern=MODULE)]], Field(min_length=1, max_length=64)]
MODEL_NAME = r"^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$"
LONGEST_NAME = 128
_RULE = f"letters, digits, '.', '_' and '-', in parts with '/' between them, as lab/tiny-1, and {LONGEST_NAME} at most"


def check_model_name(name: object) -> object:
    """Return `name` unchanged; raise `Refusal`, with the rule, for a text that is not a valid model name."""
    if isinstance(name, str) and (len(name) > LONGEST_NAME or not re.search(MODEL_NAME, name)):
        raise Refusal("invalid_value", f"The name of a model has {_RULE}.")
    return name


TemplateValue = StrictStr | StrictBool | StrictInt | StrictFloat


def _check_values(arguments: dict[str, object]) -> dict[str, object]:
    """Return the arguments of a chat template unchanged; raise `Refusal` for values that are not taken."""
    if fault := value_fault(arguments):
        raise Refusal("invalid_value", f"{fault}.")
    return arguments


TemplateArguments = Annotated[dict[str, TemplateValue | list[TemplateValue]], AfterValidator(_check_values)]


class ModelOut(BaseModel):
    """A base model on offer, or one of the caller's fine-tuned models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    # False if the server that answers cannot prove which weights it has loaded.
    attested: Annotated[Literal[False] | SkipJsonSchema[None], Absent] = None
    # The version of the audit that released it, if that is older than today's.
    older_audit: Annotated[int | SkipJsonSchema[None], Absent] = None
    # The version of its last later audit, if there was one.
    later_audit: Annotated[int | SkipJsonSchema[None], Absent] = None


class ModelList(BaseModel):
    """All base models by alias, then your own fine-tuned models, oldest first."""

    object: Literal["list"] = "list"
    data: list[ModelOut]


class ModelRates(Body):
    """A model's measured speed: generated and trained tokens per second, tokens of a reply, seconds to load it."""

    generated_per_s: Annotated[float, Field(gt=0, le=1e9)]
    reply_tokens: Annotated[float, Field(gt=0, le=1e6)]
    trained_per_s: Annotated[float, Field(gt=0, le=1e9)]
    load_s: Annotated[float, Field(ge=0, le=1e6)]


class BaseModelIn(Body):
    """A base model to offer: a local folder, or a hub id with a commit.

    `quantization` says when jobs hold it in NF4, 4 bits per weight; `if_needed`: only if no worker's GPUs hold it else.
    `digest` is the digest of its files, as `spard check-model --json` prints it; without one a folder is hashed.
    `target_modules` are the modules that adapters change by default; without them they follow from the model.
    `rates` is its measured speed, for the first estimates, as `spard check-model --json` prints it.
    `embedder` is what jobs choose safe rows by, by default: `centered_states`, `states`, or a sentence encoder.
    `template_arguments` are names that its chat template reads, with the values that they always have.
    """

    alias: Annotated[
        str,
        BeforeValidator(check_model_name),
        Field(pattern=MODEL_NAME, max_length=LONGEST_NAME),
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
    template_arguments: TemplateArguments | None = None


class LoraReach(BaseModel):
    """The layers that an adapter with these target modules covers, and the share of parameters in the modules.

    `leaves_out_experts` is true if the model has experts, and neither they nor their router are adapted.
    """

    target_modules: list[str]
    layers: int
    of_layers: int
    share: float
    leaves_out_experts: bool


class ToolSupport(BaseModel):
    """Which parts of tool use a model's chat template renders: offered tools, tool calls, and tools' results."""

    tools: bool
    tool_calls: bool
    tool: bool


class BaseModelOut(BaseModel):
    """A base model on offer.

    `tool_support` and `lora_reach` are null if the model's files are not on the machine that serves the API. `digest`
    is the digest of its files when it was added; null if they were not on that machine.
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
    template_arguments: dict[str, TemplateValue | list[TemplateValue]] | None
    created_at: UnixTime


class OfferedModelOut(BaseModelOut):
    """A base model that was just offered; `warnings` are problems that keep its jobs from releasing an adapter."""

    warnings: list[str] = []


class TemplateProbe(BaseModel):
    """An example conversation as it is trained: its number of samples, and its text with trained parts in brackets.

    Samples are separated by a line of three dashes. `refusal` says why such rows cannot be trained.
    """

    name: str
    samples: int
    text: str
    refusal: str


class TemplateCardOut(BaseModel):
    """How a model's chat template renders conversations, in sentences and by examples."""

    lines: list[str]
    probes: list[TemplateProbe]


class ModelFitness(BaseModel):
    """Which of the needed files and settings a base model has; null for what cannot be known on this machine.

    `fault` is the first problem that keeps jobs from the model.
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
    """All base models on offer, by alias."""

    object: Literal["list"] = "list"
    data: list[BaseModelOut]


class CorpusOut(BaseModel):
    """One version of a safety pool or a suite; `rows` is the number of rows that jobs see.

    `warnings` are returned by an import: problems for jobs that use it.
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


class PoolEmbedding(BaseModel):
    """A base model for which a job has computed a pool's embeddings."""

    model: str
    source: str
    revision: str | None
    latest_at: UnixTime


class PoolOut(CorpusOut):
    """One version of a safety pool.

    `held_out` is the number of prompts that jobs never train on; they are the attacks if the provider has no harmful
    suite. `embedded_for` lists the base models of succeeded jobs with this version that were not erased.
    """

    held_out: int
    embedded_for: list[PoolEmbedding]

    @classmethod
    def from_pool(cls, pool: Corpus, held_out: int, embedded_for: list[PoolEmbedding]) -> Self:
        """Return the API object of a pool's row, its number of held-out prompts and its embeddings."""
        columns = {name: getattr(pool, name) for name in CorpusOut.model_fields if hasattr(pool, name)}
        return cls(**columns, held_out=held_out, embedded_for=embedded_for)


class CorpusDeleted(BaseModel):
    """Confirms that a version of a safety pool or suite was deleted."""

    id: str
    object: Literal["corpus"] = "corpus"
    deleted: Literal[True] = True


class PoolList(BaseModel):
    """All versions of all safety pools, newest first."""

    object: Literal["list"] = "list"
    data: list[PoolOut]


class SuiteList(BaseModel):
    """All versions of all suites, newest first."""

    object: Literal["list"] = "list"
    data: list[CorpusOut]
