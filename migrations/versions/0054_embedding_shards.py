"""Add embedding shards: stored embeddings of pools, computed once for each base model."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0054"
down_revision = "0053"


def upgrade() -> None:
    op.create_table(
        "embedding_shards",
        sa.Column("storage_key", sa.String(), nullable=False),
        sa.Column("pool_sha256", sa.String(), nullable=False),
        sa.Column("base_digest", sa.String(), nullable=False),
        sa.Column("entry", sa.String(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("storage_key", name="pk_embedding_shards"),
        sa.UniqueConstraint(
            "pool_sha256", "base_digest", "entry", name="uq_embedding_shards_pool_sha256_base_digest_entry"
        ),
    )


def downgrade() -> None:
    op.drop_table("embedding_shards")
