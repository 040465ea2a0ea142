"""Add adapters that the gate held back, and waivers that release them.

The trigger that protects ended jobs gets one exception: an approved waiver makes a job succeeded.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"

_MESSAGE = "a job that has ended never changes"
_ENDED = "OLD.status IN ('succeeded', 'failed', 'cancelled')"
_WAIVED = (
    "NEW.status = 'succeeded' AND EXISTS (SELECT 1 FROM waivers WHERE job_id = OLD.id AND approved_at IS NOT NULL)"
)
_WITH_WAIVERS = {
    "sqlite": [
        "DROP TRIGGER jobs_ended",
        f"CREATE TRIGGER jobs_ended BEFORE UPDATE ON jobs WHEN {_ENDED} AND NOT ({_WAIVED}) "
        f"BEGIN SELECT RAISE(ABORT, '{_MESSAGE}'); END",
    ],
    "postgresql": [
        f"CREATE OR REPLACE FUNCTION jobs_ended() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN IF NOT ({_WAIVED}) THEN RAISE EXCEPTION '{_MESSAGE}'; END IF; RETURN NEW; END $$",
    ],
}
_WITHOUT = {
    "sqlite": [
        "DROP TRIGGER jobs_ended",
        f"CREATE TRIGGER jobs_ended BEFORE UPDATE ON jobs WHEN {_ENDED} BEGIN SELECT RAISE(ABORT, '{_MESSAGE}'); END",
    ],
    "postgresql": [
        f"CREATE OR REPLACE FUNCTION jobs_ended() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{_MESSAGE}'; END $$",
    ],
}


def upgrade() -> None:
    op.create_table(
        "held_adapters",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("storage_key", sa.String(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("manifest_sha256", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_held_adapters_job_id"),
        sa.PrimaryKeyConstraint("job_id", name="pk_held_adapters"),
    )
    op.create_table(
        "waivers",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("proposed_by", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("approved_by", sa.String(), nullable=True),
        sa.Column("approved_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("record", sa.String(), nullable=True),
        sa.Column("signature", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_waivers_job_id"),
        sa.ForeignKeyConstraint(["proposed_by"], ["api_keys.id"], name="fk_waivers_proposed_by"),
        sa.ForeignKeyConstraint(["approved_by"], ["api_keys.id"], name="fk_waivers_approved_by"),
        sa.PrimaryKeyConstraint("id", name="pk_waivers"),
    )
    op.create_index("ix_waivers_job_id", "waivers", ["job_id"])
    for statement in _WITH_WAIVERS[op.get_bind().dialect.name]:
        op.execute(statement)


def downgrade() -> None:
    for statement in _WITHOUT[op.get_bind().dialect.name]:
        op.execute(statement)
    op.drop_table("waivers")
    op.drop_table("held_adapters")
