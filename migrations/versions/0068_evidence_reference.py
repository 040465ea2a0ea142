"""Add a base model's reference for the evidence of its jobs; null means that there is none yet."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0068"
down_revision = "0067"


def upgrade() -> None:
    op.add_column("base_models", sa.Column("evidence_reference", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("base_models", "evidence_reference")
