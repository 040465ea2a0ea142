"""Add a base model's default target modules of adapters, and the share of the model that they cover."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from app.db.base import Json

revision = "0059"
down_revision = "0058"


def upgrade() -> None:
    op.add_column("base_models", sa.Column("target_modules", Json, nullable=True))
    op.add_column("base_models", sa.Column("lora_reach", Json, nullable=True))


def downgrade() -> None:
    op.drop_column("base_models", "lora_reach")
    op.drop_column("base_models", "target_modules")
