"""Add when a base model is held in NF4."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0053"
down_revision = "0052"


def upgrade() -> None:
    op.add_column("base_models", sa.Column("quantization", sa.String(), nullable=False, server_default="never"))


def downgrade() -> None:
    op.drop_column("base_models", "quantization")
