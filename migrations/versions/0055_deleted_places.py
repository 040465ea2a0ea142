"""Add the list positions of deleted rows, so that pagination can continue after one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0055"
down_revision = "0054"


def upgrade() -> None:
    op.create_table(
        "deleted_places",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("list_id", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_deleted_places"),
    )
    op.create_index("ix_deleted_places_deleted_at", "deleted_places", ["deleted_at"])


def downgrade() -> None:
    op.drop_table("deleted_places")
