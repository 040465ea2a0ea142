"""Index the queue in its full order, so that a claim reads one job and sorts none."""

from __future__ import annotations

from alembic import op

revision = "0030"
down_revision = "0023"

_OLD = "ix_jobs_status_tenant_id_priority_created_at"
_NEW = "ix_jobs_status_tenant_id_priority_created_at_id"


def upgrade() -> None:
    op.create_index(_NEW, "jobs", ["status", "tenant_id", "priority", "created_at", "id"])
    op.drop_index(_OLD, "jobs")


def downgrade() -> None:
    op.create_index(_OLD, "jobs", ["status", "tenant_id", "priority", "created_at"])
    op.drop_index(_NEW, "jobs")
