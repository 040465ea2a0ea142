"""Add deleted models and tombstones of erased jobs.

A trigger keeps a job's row from being deleted before its tombstone exists.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_MESSAGE = "a job leaves a tombstone"
_STANDS = "EXISTS (SELECT 1 FROM tombstones WHERE job_id = OLD.id)"
_TRIGGER = {
    "sqlite": [
        f"CREATE TRIGGER jobs_erased BEFORE DELETE ON jobs WHEN NOT {_STANDS} "
        f"BEGIN SELECT RAISE(ABORT, '{_MESSAGE}'); END",
    ],
    "postgresql": [
        f"CREATE FUNCTION jobs_erased() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN IF NOT {_STANDS} THEN RAISE EXCEPTION '{_MESSAGE}'; END IF; RETURN OLD; END $$",
        "CREATE TRIGGER jobs_erased BEFORE DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION jobs_erased()",
    ],
}


def upgrade() -> None:
    op.create_table(
        "deleted_models",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_deleted_models_job_id"),
        sa.PrimaryKeyConstraint("job_id", name="pk_deleted_models"),
    )
    op.create_table(
        "tombstones",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("erased_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("digests", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_tombstones_tenant_id"),
        sa.PrimaryKeyConstraint("job_id", name="pk_tombstones"),
    )
    for statement in _TRIGGER[op.get_bind().dialect.name]:
        op.execute(statement)


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP TRIGGER jobs_erased ON jobs")
        op.execute("DROP FUNCTION jobs_erased")
    else:
        op.execute("DROP TRIGGER jobs_erased")
    op.drop_table("tombstones")
    op.drop_table("deleted_models")
