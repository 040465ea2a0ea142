"""Add a row for each inference request, and token limits of projects."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0046"
down_revision = "0045"


def upgrade() -> None:
    op.create_table(
        "inference_calls",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("key_id", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("endpoint", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("archive_sha256", sa.String(), nullable=True),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("reply_tokens", sa.Integer(), nullable=False),
        sa.Column("first_token_s", sa.Double(), nullable=True),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_inference_calls_tenant_id"),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name="fk_inference_calls_key_id"),
        sa.PrimaryKeyConstraint("id", name="pk_inference_calls"),
    )
    op.create_index("ix_inference_calls_tenant_id_created_at", "inference_calls", ["tenant_id", "created_at"])
    op.add_column("quotas", sa.Column("tokens_per_minute", sa.Integer(), nullable=True))
    op.add_column("quotas", sa.Column("max_tokens_per_day", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("quotas", "max_tokens_per_day")
    op.drop_column("quotas", "tokens_per_minute")
    op.drop_table("inference_calls")
