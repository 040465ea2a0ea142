"""The embedder that jobs on a base model choose safe rows by; null: the default."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0064"
down_revision = "0063"


def upgrade() -> None:
    op.add_column("base_models", sa.Column("embedder", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("base_models", "embedder")
