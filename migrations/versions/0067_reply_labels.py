"""Add the drawn replies that people label, and their scores."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0067"
down_revision = "0066"


def upgrade() -> None:
    op.create_table(
        "sampled_replies",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("stratum", sa.String(), nullable=False),
        sa.Column("population", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_sampled_replies_job_id"),
        sa.PrimaryKeyConstraint("id", name="pk_sampled_replies"),
        sa.UniqueConstraint("job_id", "number", name="uq_sampled_replies_job_id_number"),
        sa.UniqueConstraint("model", "place", name="uq_sampled_replies_model_place"),
    )
    op.create_table(
        "reply_labels",
        sa.Column("reply_id", sa.String(), nullable=False),
        sa.Column("labeler", sa.String(), nullable=False),
        sa.Column("settles", sa.Boolean(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("score", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_reply_labels_job_id"),
        sa.ForeignKeyConstraint(["reply_id"], ["sampled_replies.id"], name="fk_reply_labels_reply_id"),
        sa.PrimaryKeyConstraint("reply_id", "labeler", "settles", name="pk_reply_labels"),
    )
    op.create_index("ix_reply_labels_job_id", "reply_labels", ["job_id"])


def downgrade() -> None:
    op.drop_table("reply_labels")
    op.drop_table("sampled_replies")
