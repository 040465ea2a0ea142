"""Add tables of checkpoints, which customers can list, and of permissions to see them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "job_checkpoints",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_checkpoints_job_id"),
        sa.PrimaryKeyConstraint("job_id", "step", name="pk_job_checkpoints"),
        sa.UniqueConstraint("id", name="uq_job_checkpoints_id"),
    )
    op.create_table(
        "checkpoint_permissions",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_checkpoint_permissions_job_id"),
        sa.PrimaryKeyConstraint("id", name="pk_checkpoint_permissions"),
        sa.UniqueConstraint("job_id", "step", "project_id", name="uq_checkpoint_permissions_job_id_step_project_id"),
    )


def downgrade() -> None:
    op.drop_table("checkpoint_permissions")
    op.drop_table("job_checkpoints")
