"""Add quotas of projects and the usage of jobs; an erased job's usage stays in its tombstone."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    op.create_table(
        "quotas",
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("max_file_bytes", sa.BigInteger(), nullable=True),
        sa.Column("max_file_rows", sa.BigInteger(), nullable=True),
        sa.Column("max_jobs_per_day", sa.Integer(), nullable=True),
        sa.Column("max_unfinished_jobs", sa.Integer(), nullable=True),
        sa.Column("max_gpu_seconds", sa.Double(), nullable=True),
        sa.Column("requests_per_minute", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_quotas_tenant_id"),
        sa.PrimaryKeyConstraint("tenant_id", name="pk_quotas"),
    )
    op.add_column("jobs", sa.Column("gpu_seconds", sa.Double(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("seen_at", sa.Double(), nullable=True))
    op.add_column("tombstones", sa.Column("gpu_seconds", sa.Double(), nullable=False, server_default="0"))
    op.add_column("tombstones", sa.Column("trained_tokens", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("tombstones", "trained_tokens")
    op.drop_column("tombstones", "gpu_seconds")
    op.drop_column("jobs", "seen_at")
    op.drop_column("jobs", "gpu_seconds")
    op.drop_table("quotas")
