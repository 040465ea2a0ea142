"""Tables of what the provider offers: base models, safety pools, audit suites and the versions of the policy."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column
from typing_extensions import TypedDict

from app.db.base import Base, Json, new_id, utc_now
from spard.data.rendering import fixed_arguments


class LoraReachJson(TypedDict):
    """The stored form of `spard.models.targets.Reach`."""

    target_modules: list[str]
    layers: int
    of_layers: int
    share: float
    leaves_out_experts: bool


class ModelRates(TypedDict):
    """The stored form of `spard.training.trial.Rates`."""

    generated_per_s: float
    reply_tokens: float
    trained_per_s: float
    load_s: float


class BaseModelEntry(Base):
    """A base model on offer; customers know only the alias."""

    __tablename__ = "base_models"

    alias: Mapped[str] = mapped_column(primary_key=True)
    source: Mapped[str]  # a local folder or a hub id
    revision: Mapped[str | None]
    learning_rate: Mapped[float | None]
    allow_full_fine_tuning: Mapped[bool] = mapped_column(default=False)
    quantization: Mapped[str] = mapped_column(default="never", server_default="never")  # `spard.config.Quantizes`
    # Whether its chat template renders `tools`, `tool_calls` and `tool`; null if its tokenizer was not available.
    tool_support: Mapped[dict[str, bool] | None] = mapped_column(Json)
    # Digest of its files when it was offered; null if they were not available, and in entries of older versions.
    digest: Mapped[str | None]
    # How its chat template is rendered (`spard.data.rendering`); null if its tokenizer was not available.
    rendering: Mapped[dict[str, object] | None] = mapped_column(Json)
    target_modules: Mapped[list[str] | None] = mapped_column(Json)  # default for its jobs' adapters
    # What an adapter of the default target modules covers; null if its weights were not available.
    lora_reach: Mapped[LoraReachJson | None] = mapped_column(Json)
    # Its speed in its trial, in tokens per second; null without a trial, as in entries of older versions.
    rates: Mapped[ModelRates | None] = mapped_column(Json)
    embedder: Mapped[str | None]  # default embedder of its jobs; null: the general default
    # Shift ratios of its jobs that passed (`spard.release.records`), numbers alone; null: there are none yet.
    evidence_reference: Mapped[dict[str, object] | None] = mapped_column(Json)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)

    @property
    def template_arguments(self) -> dict[str, object] | None:
        """The arguments of its chat template that the provider has fixed; None if there are none."""
        return fixed_arguments(self.rendering) or None


class Corpus(Base):
    """A version of a safety pool or audit suite; the newest version of a name that is not deleted is current.

    `kind` is `pool`, or for suites the expected reply: `harmful` (refuse), `benign` (comply), `utility` (`answer`).
    `benign_rows` is null for suites, and for pools that were imported before it was counted.
    """

    __tablename__ = "corpora"
    __table_args__ = (UniqueConstraint("kind", "name", "version"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("corpus-"))
    kind: Mapped[str]
    name: Mapped[str]
    version: Mapped[int]
    rows: Mapped[int]
    benign_rows: Mapped[int | None]
    bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str]
    storage_key: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    deleted_at: Mapped[datetime | None]  # its version number is not reused


class EmbeddingShard(Base):
    """A piece of a pool's embeddings in storage, for one embedder.

    It is deleted with the last pool version that has the same rows. `base_digest` is the digest of the embedding model:
    a base model or a sentence encoder. `entry` is the shard's name in a worker's cache, which contains a digest of
    everything that its content depends on.
    """

    __tablename__ = "embedding_shards"
    __table_args__ = (UniqueConstraint("pool_sha256", "base_digest", "entry"),)

    storage_key: Mapped[str] = mapped_column(primary_key=True)
    pool_sha256: Mapped[str]
    base_digest: Mapped[str]
    entry: Mapped[str]
    sha256: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class PolicyVersion(Base):
    """A version of the policy; the highest is in force, and every job keeps the version that it was created under."""

    __tablename__ = "policy_versions"

    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    created_by: Mapped[str]  # a key's id
    content: Mapped[dict[str, object]]  # app.policies.schemas.Policy as JSON
