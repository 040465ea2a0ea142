"""The idle seconds of a job's attempt that are already subtracted from its GPU time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0066"
down_revision = "0065"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("idle_seconds", sa.Double(), server_default="0", nullable=False))


def downgrade() -> None:
    op.drop_column("jobs", "idle_seconds")
