"""Add a base model's default embedder for selecting safe rows; null means the service's default."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0064"
down_revision = "0063"


def upgrade() -> None:
    op.add_column("base_models", sa.Column("embedder", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("base_models", "embedder")
