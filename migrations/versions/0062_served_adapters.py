"""Add the adapters that a vLLM server has loaded, so that withdrawn ones can be unloaded."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0062"
down_revision = "0061"


def upgrade() -> None:
    op.create_table(
        "served_adapters",
        sa.Column("server", sa.String(), primary_key=True),
        sa.Column("sha256", sa.String(), primary_key=True),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("base", sa.String(), nullable=False),
        sa.Column("loaded_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("condemned_at", sa.DateTime(timezone=True), nullable=True),
    )
    op.create_index("ix_served_adapters_job_id", "served_adapters", ["job_id"])


def downgrade() -> None:
    op.drop_index("ix_served_adapters_job_id", "served_adapters")
    op.drop_table("served_adapters")
