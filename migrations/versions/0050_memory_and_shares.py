"""Add the GPU memory of jobs and workers, and the GPU time by which projects share the GPUs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0050"
down_revision = "0049"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("memory_bytes", sa.BigInteger(), nullable=True))
    op.add_column("jobs", sa.Column("shared_bytes", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("jobs", sa.Column("gpu_seconds_before", sa.Double(), server_default="0", nullable=False))
    op.add_column("workers", sa.Column("memory_bytes", sa.BigInteger(), nullable=True))
    op.add_column("workers", sa.Column("gpus", sa.Integer(), server_default="1", nullable=False))
    op.add_column("tenants", sa.Column("used_seconds", sa.Double(), server_default="0", nullable=False))
    op.add_column("tenants", sa.Column("used_at", sa.Double(), server_default="0", nullable=False))
    op.add_column("quotas", sa.Column("weight", sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column("quotas", "weight")
    op.drop_column("tenants", "used_at")
    op.drop_column("tenants", "used_seconds")
    op.drop_column("workers", "gpus")
    op.drop_column("workers", "memory_bytes")
    op.drop_column("jobs", "gpu_seconds_before")
    op.drop_column("jobs", "shared_bytes")
    op.drop_column("jobs", "memory_bytes")
