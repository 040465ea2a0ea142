"""The embedder that jobs on a base model choose safe rows by; null: the default."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0063"
down_revision = "0062"


def upgrade() -> None:
    op.add_column("base_models", sa.Column("embedder", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("base_models", "embedder")
