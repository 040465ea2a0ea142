"""Add costs of a job's stages, speed of base models, and the wish to audit the last epochs of a cancelled job."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from app.db.base import Json

revision = "0063"
down_revision = "0062"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("audits_last", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("jobs", sa.Column("stage_costs", Json, nullable=True))
    op.add_column("base_models", sa.Column("rates", Json, nullable=True))


def downgrade() -> None:
    op.drop_column("base_models", "rates")
    op.drop_column("jobs", "stage_costs")
    op.drop_column("jobs", "audits_last")
