"""Add the reason why a cluster does not start a queued job."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0052"
down_revision = "0051"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("launch_reason", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "launch_reason")
