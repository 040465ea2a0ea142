"""Add owner, lease and reserved tokens of inference requests; stops and wait reason of jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0061"
down_revision = "0060"

_RUNNING = sa.text("status = 'running'")


def upgrade() -> None:
    op.add_column("inference_calls", sa.Column("reserved_tokens", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("inference_calls", sa.Column("owner", sa.String(), nullable=True))
    op.add_column("inference_calls", sa.Column("lease_expires_at", sa.Double(), nullable=True))
    op.create_index(
        "ix_inference_calls_running",
        "inference_calls",
        ["created_at"],
        sqlite_where=_RUNNING,
        postgresql_where=_RUNNING,
    )
    op.add_column("jobs", sa.Column("stops", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("waiting_for", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "waiting_for")
    op.drop_column("jobs", "stops")
    op.drop_index("ix_inference_calls_running", "inference_calls")
    for name in ("lease_expires_at", "owner", "reserved_tokens"):
        op.drop_column("inference_calls", name)
