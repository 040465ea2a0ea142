"""Add rows for objects that are being written or deleted, and findings of comparing database and storage."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0034"
down_revision = "0033"


def upgrade() -> None:
    """Keep condemned_objects for older versions; this version moves its rows into the new table as it sweeps."""
    op.create_table(
        "object_intents",
        sa.Column("storage_key", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=True),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("last_error", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("storage_key", name="pk_object_intents"),
    )
    op.create_index("ix_object_intents_subject", "object_intents", ["subject"])
    op.create_index("ix_object_intents_tenant_id", "object_intents", ["tenant_id"])
    op.create_table(
        "object_findings",
        sa.Column("storage_key", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("why", sa.String(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("first_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("storage_key", name="pk_object_findings"),
    )
    op.create_table(
        "object_marks",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("database_id", sa.String(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("marked_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("checked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("restored_from", sa.DateTime(timezone=True), nullable=True),
        sa.Column("other_database", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_object_marks"),
    )
    op.add_column("tombstones", sa.Column("deleted_files", sa.JSON(), nullable=True))


def downgrade() -> None:
    """Copy pending deletions back for older code, which does not know about objects that are being written."""
    op.drop_column("tombstones", "deleted_files")
    op.execute(
        "INSERT INTO condemned_objects (storage_key, created_at) SELECT storage_key, created_at FROM object_intents "
        "WHERE kind = 'delete' AND storage_key NOT IN (SELECT storage_key FROM condemned_objects)"
    )
    op.drop_table("object_marks")
    op.drop_table("object_findings")
    op.drop_index("ix_object_intents_tenant_id", table_name="object_intents")
    op.drop_index("ix_object_intents_subject", table_name="object_intents")
    op.drop_table("object_intents")
