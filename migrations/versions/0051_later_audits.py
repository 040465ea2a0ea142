"""Add later audits: results of today's audit on models that an older audit released."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0051"
down_revision = "0050"


def upgrade() -> None:
    op.create_table(
        "later_audits",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("audit_version", sa.Integer(), nullable=False),
        sa.Column("audit_job_id", sa.String(), nullable=True),
        sa.Column("asked_by", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("decided_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("decision", sa.String(), nullable=True),
        sa.Column("reasons", sa.JSON(), nullable=True),
        sa.Column("record", sa.String(), nullable=True),
        sa.Column("signature", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_later_audits_job_id"),
        sa.ForeignKeyConstraint(["asked_by"], ["api_keys.id"], name="fk_later_audits_asked_by"),
        sa.PrimaryKeyConstraint("id", name="pk_later_audits"),
        sa.UniqueConstraint("job_id", "step", "round", name="uq_later_audits_job_id_step_round"),
    )
    op.create_index("ix_later_audits_audit_job_id", "later_audits", ["audit_job_id"])
    op.create_index("ix_later_audits_decided_at", "later_audits", ["decided_at"])


def downgrade() -> None:
    op.drop_table("later_audits")
