"""What the provider offers: base models, safety pools and audit suites."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column
from typing_extensions import TypedDict

from app.db.base import Base, Json, new_id, utc_now


class LoraReachJson(TypedDict):
    """`spard.models.targets.Reach`."""

    target_modules: list[str]
    layers: int
    of_layers: int
    share: float
    leaves_out_experts: bool


class ModelRates(TypedDict):
    """`spard.training.trial.Rates`."""

    generated_per_s: float
    reply_tokens: float
    trained_per_s: float
    load_s: float


class BaseModelEntry(Base):
    """A base model that the provider offers; customers name the alias only."""

    __tablename__ = "base_models"

    alias: Mapped[str] = mapped_column(primary_key=True)
    source: Mapped[str]  # a local folder or a hub id
    revision: Mapped[str | None]
    learning_rate: Mapped[float | None]
    allow_full_fine_tuning: Mapped[bool] = mapped_column(default=False)
    quantization: Mapped[str] = mapped_column(default="never", server_default="never")  # `spard.config.Quantizes`
    # Whether its chat template renders `tools`, `tool_calls` and `tool`; null where its tokenizer was not at hand.
    tool_support: Mapped[dict[str, bool] | None] = mapped_column(Json)
    # Of its files when it was offered; null where they were not at hand, and in entries from before there was one.
    digest: Mapped[str | None]
    # How its chat template is rendered (`spard.data.rendering`); null where its tokenizer was not at hand.
    rendering: Mapped[dict[str, object] | None] = mapped_column(Json)
    target_modules: Mapped[list[str] | None] = mapped_column(Json)  # of its jobs' adapters, unless they name others
    # What an adapter of the default target modules reaches; null where its weights were not at hand.
    lora_reach: Mapped[LoraReachJson | None] = mapped_column(Json)
    # How fast it was when it was tried, in tokens a second; null where it was not, as in entries from before.
    rates: Mapped[ModelRates | None] = mapped_column(Json)
    embedder: Mapped[str | None]  # of its jobs, unless they name another; null: the default
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class Corpus(Base):
    """A version of a safety pool or of an audit suite; the newest of a name that is not deleted is the current one.

    `kind` is `pool`, or for suites what a right answer is: `harmful` (refuse), `benign` (comply), `utility` (`answer`).
    `benign_rows` is null of suites, and of pools that were imported before it was counted.
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
    deleted_at: Mapped[datetime | None]  # its number is not given out again


class EmbeddingShard(Base):
    """A piece of a pool's embeddings in storage, for one embedder; it goes with the last version of these rows.

    `base_digest` is that of the model that made them: a base model, or a sentence encoder.
    `entry` is its name in a worker's cache, which holds a digest of all that its content depends on.
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
