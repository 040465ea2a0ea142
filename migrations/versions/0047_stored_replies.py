"""Add stored prompts and replies, and mark requests that an unattested server answered."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0047"
down_revision = "0046"


def upgrade() -> None:
    op.create_table(
        "stored_replies",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=True),
        sa.Column("prompt", sa.JSON(), nullable=False),
        sa.Column("replies", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["id"], ["inference_calls.id"], name="fk_stored_replies_id"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_stored_replies_tenant_id"),
        sa.PrimaryKeyConstraint("id", name="pk_stored_replies"),
    )
    op.create_index("ix_stored_replies_tenant_id_created_at", "stored_replies", ["tenant_id", "created_at"])
    op.create_index("ix_stored_replies_expires_at", "stored_replies", ["expires_at"])
    op.create_index("ix_stored_replies_job_id", "stored_replies", ["job_id"])
    op.add_column("inference_calls", sa.Column("is_attested", sa.Boolean(), server_default=sa.true(), nullable=False))


def downgrade() -> None:
    op.drop_column("inference_calls", "is_attested")
    op.drop_table("stored_replies")
