"""An index for the latest finished jobs of a base model, whose audits show what it refuses."""

from __future__ import annotations

from alembic import op

revision = "0069"
down_revision = "0068"


def upgrade() -> None:
    op.create_index("ix_jobs_model_finished_at", "jobs", ["model", "finished_at"])


def downgrade() -> None:
    op.drop_index("ix_jobs_model_finished_at", "jobs")
