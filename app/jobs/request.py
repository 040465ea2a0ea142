"""Define the request for a job: OpenAI's fields and ours, with the settings and bounds of `spard.config`."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, Union

from pydantic import AfterValidator, BaseModel, Discriminator, Field, GetCoreSchemaHandler, Tag, model_validator
from pydantic_core import CoreSchema

from app.http.schemas import Body, Refusal
from spard import config
from spard.data import jsonl
from spard.models.targets import MODULE

_SUFFIX_CHARS = 64
# Latin letters that Unicode does not decompose into a plain letter and a mark.
_LETTERS = str.maketrans(
    {"ß": "ss", "ẞ": "SS", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L"}
    | {"đ": "d", "Đ": "D", "ð": "d", "Ð": "D", "þ": "th", "Þ": "Th", "ħ": "h", "Ħ": "H", "\u0131": "i"}
)
_MODULE = re.compile(MODULE)


def _suffix(text: str) -> str:
    """Validate a suffix: printable, of limited length, with a character that model names can contain."""
    if not text.isprintable() or not 1 <= len(text) <= _SUFFIX_CHARS or not _in_name(text):
        message = f"must be 1 to {_SUFFIX_CHARS} printable characters, at least one of them of a-z, A-Z, 0-9."
        raise Refusal("invalid_name", message)
    return text


def _in_name(suffix: str) -> str:
    """Return a suffix as it appears in model names: accents removed, every other character a hyphen."""
    # NFKD splits an accented letter into the letter and its marks, which are then dropped.
    letters = unicodedata.normalize("NFKD", suffix.translate(_LETTERS))
    plain = "".join(char for char in letters if not unicodedata.combining(char))
    return re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("-")


def _modules(lora: config.Lora) -> config.Lora:
    for name in lora.target_modules or ():
        if not _MODULE.fullmatch(name):
            raise Refusal("unsupported_module", f"{name[:64]!r} in target_modules is not a module's name.")
    return lora


def _defense_type(value: Any) -> Any:
    """Return the name of the requested defense; `spard` if none is named."""
    kind = value.get("type", "spard") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


class _AnyDefense:
    """Annotates the union of all registered defenses, discriminated by `type`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # Built together with the schema, from all defenses that are registered by then.
        kinds = tuple(Annotated[kind, Tag(name)] for name, kind in config.defenses().items())
        return handler.generate_schema(Annotated[Union[kinds], Discriminator(_defense_type)])  # noqa: UP007  # of a tuple


Defense = Annotated[config.Defense, _AnyDefense()]


class Safety(Body):
    """The defense, the selection of its safe rows, and the audit before release."""

    defense: Defense = Field(default_factory=config.Spard)
    selection: config.Selection = Field(default_factory=config.Selection)
    audit: config.Audit = Field(default_factory=config.Audit)
    pool: str | None = Field(default=None, description="Id of a safety pool version; default: the current one.")


class Supervised(Body):
    """OpenAI's `supervised`. A hyperparameter that is `"auto"` or left out is chosen by the provider."""

    hyperparameters: config.Hyperparameters | None = None


@dataclass(frozen=True, slots=True)
class DpoHyperparameters(config.Hyperparameters):
    """OpenAI's hyperparameters of `dpo`; a larger `beta` keeps the model closer to the model it starts from."""

    beta: config.Beta = "auto"


class Dpo(Body):
    """OpenAI's `dpo`: learning from preference pairs."""

    hyperparameters: DpoHyperparameters | None = None


class Method(Body):
    """OpenAI's `method`; `supervised` and `dpo` are trained here."""

    type: Literal["supervised", "dpo", "reinforcement"]
    supervised: Supervised | None = None
    dpo: Dpo | None = None
    reinforcement: dict[str, object] | None = None

    @property
    def hyperparameters(self) -> config.Hyperparameters | None:
        """The hyperparameters of the method that `type` names."""
        asked = self.dpo if self.type == "dpo" else self.supervised
        return asked.hyperparameters if asked else None


class Wandb(BaseModel):
    """The run that OpenAI's `wandb` integration writes to."""

    project: Annotated[str, Field(min_length=1, max_length=128)]
    name: Annotated[str, Field(max_length=128)] | None = None
    entity: Annotated[str, Field(max_length=128)] | None = None
    tags: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=64)] | None = None


class Integration(BaseModel):
    """One of OpenAI's integrations. If the provider has not turned it on, the job carries a warning, not an error."""

    type: str
    wandb: Wandb | None = None


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class JobCreate(Body):
    """OpenAI's request for a job, extended by the fields after `metadata`."""

    model: str
    training_file: str
    validation_file: str | None = None
    suffix: Annotated[str, AfterValidator(_suffix)] | None = None
    seed: config.Seed | None = None
    method: Method | None = None
    hyperparameters: config.Hyperparameters | None = Field(
        default=None,
        json_schema_extra={"deprecated": True},
        description="OpenAI's deprecated place for hyperparameters.",
    )
    integrations: Annotated[list[Integration], Field(max_length=5)] | None = None
    metadata: Metadata | None = None

    safety: Safety | None = None
    lora: Annotated[config.Lora, AfterValidator(_modules)] | None = None
    full_fine_tuning: bool = False
    optimizer: config.OptimizerName = Field(
        default="adamw", description="`adamw_8bit` holds AdamW's moments in 8 bits, for full fine-tuning."
    )
    max_seq_length: config.SeqLength | None = None
    ending: config.Ending | None = Field(
        default=None, description="Which epoch's weights are released, and when training stops early."
    )
    priority: int = Field(
        default=0, ge=-100, le=100, description="Among the project's queued jobs the lowest number starts first."
    )
    held_out_rows: config.HeldOutRowsLimit | None = Field(
        default=None,
        description="The most rows that are held out of the training to measure if the task is learned; 0: none.",
    )

    @model_validator(mode="before")
    @classmethod
    def _has_plain_text(cls, body: Any) -> Any:
        jsonl.check_json(body)
        return body

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        asked = self.method.hyperparameters if self.method else None
        if self.method and self.hyperparameters and asked and _common(asked) != self.hyperparameters:
            place = f"method.{self.method.type}.hyperparameters"
            raise Refusal("not_allowed", f"hyperparameters and {place} differ; give one.")
        if self.lora and self.full_fine_tuning:
            raise Refusal("not_allowed", "Give lora or full_fine_tuning, not both.")
        if self.optimizer != "adamw" and not self.full_fine_tuning:
            raise Refusal("not_allowed", f"{self.optimizer} saves memory in full fine-tuning; leave optimizer out.")
        if self.full_fine_tuning and self.ending and self.ending.compares:
            raise Refusal("not_allowed", "ending compares the weights of LoRA adapters; leave full_fine_tuning out.")
        return self

    def asked_hyperparameters(self) -> config.Hyperparameters:
        """Return the hyperparameters of `method` or of the old field; the defaults if neither is set."""
        asked = self.method.hyperparameters if self.method else None
        return _common(asked) if asked else self.hyperparameters or config.Hyperparameters()

    def asked_dpo(self) -> config.Dpo | None:
        """Return the requested settings of DPO; None for another method."""
        if self.method is None or self.method.type != "dpo":
            return None
        asked = self.method.hyperparameters
        return config.Dpo(asked.beta) if isinstance(asked, DpoHyperparameters) else config.Dpo()

    def suffix_in_name(self) -> str | None:
        """Return the suffix as it will appear in the model's name."""
        return _in_name(self.suffix) if self.suffix is not None else None

    def digest(self) -> str:
        """Return a digest that is equal for two requests for the same job, across versions of the service.

        Settings that were added later are left out at their defaults, because digests stored by earlier versions lack
        them.
        """
        # Unset fields are left out, so a field that a later version adds does not change the digest of an old request.
        asked = self.model_dump(mode="json", exclude_unset=True)
        for group, added in _ADDED.items():
            settings = (asked.get("safety") or {}).get(group) or {}
            for name, default in added.items():
                if settings.get(name) == default:
                    del settings[name]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


_ADDED: dict[str, dict[str, str | bool]] = {"selection": {"embedder": "auto"}, "audit": {"sequential": True}}
"""Settings of `safety` that were added after digests of requests were first stored, with their defaults."""


def _common(asked: config.Hyperparameters) -> config.Hyperparameters:
    """Return the three hyperparameters that every method has."""
    return config.Hyperparameters(asked.n_epochs, asked.batch_size, asked.learning_rate_multiplier)
