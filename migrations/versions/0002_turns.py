"""Add job priority, deadline and last failure, and an index by project and priority for fair scheduling."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_QUEUE = "ix_jobs_status_tenant_id_priority_created_at"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("priority", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("deadline_at", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("last_failure", sa.JSON(), nullable=True))
    op.create_index(_QUEUE, "jobs", ["status", "tenant_id", "priority", "created_at"])
    op.create_index("ix_jobs_tenant_id_started_at", "jobs", ["tenant_id", "started_at"])
    op.create_index("ix_jobs_deadline_at", "jobs", ["deadline_at"])
    op.drop_index("ix_jobs_status_created_at", "jobs")


def downgrade() -> None:
    op.create_index("ix_jobs_status_created_at", "jobs", ["status", "created_at"])
    op.drop_index("ix_jobs_deadline_at", "jobs")
    op.drop_index("ix_jobs_tenant_id_started_at", "jobs")
    op.drop_index(_QUEUE, "jobs")
    for name in ("last_failure", "deadline_at", "priority"):
        op.drop_column("jobs", name)
