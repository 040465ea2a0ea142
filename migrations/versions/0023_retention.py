"""Add tables of objects to delete, and of jobs whose abandoned attempts were swept."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"


def upgrade() -> None:
    op.create_table(
        "condemned_objects",
        sa.Column("storage_key", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("storage_key", name="pk_condemned_objects"),
    )
    op.create_table(
        "swept_jobs",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("swept_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_swept_jobs_job_id"),
        sa.PrimaryKeyConstraint("job_id", name="pk_swept_jobs"),
    )


def downgrade() -> None:
    op.drop_table("swept_jobs")
    op.drop_table("condemned_objects")
