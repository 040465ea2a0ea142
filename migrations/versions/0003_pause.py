"""Add the time at which a running job was asked to pause."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("pause_requested_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    """Requeue paused jobs: older code does not know their status."""
    op.execute("UPDATE jobs SET status = 'queued' WHERE status = 'paused'")
    op.drop_column("jobs", "pause_requested_at")
