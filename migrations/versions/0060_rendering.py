"""Add how a base model's chat template is rendered; null for existing models."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from app.db.base import Json

revision = "0060"
down_revision = "0059"


def upgrade() -> None:
    op.add_column("base_models", sa.Column("rendering", Json, nullable=True))


def downgrade() -> None:
    op.drop_column("base_models", "rendering")
