"""Make policy versions append-only: triggers refuse updates, deletes and truncation."""

from __future__ import annotations

from alembic import op

revision = "0032"
down_revision = "0031"

_MESSAGE = "a version of the policy is never changed"
_VERBS = ("UPDATE", "DELETE")
_MADE = {
    "sqlite": [
        f"CREATE TRIGGER policy_versions_{verb.lower()} BEFORE {verb} ON policy_versions "
        f"BEGIN SELECT RAISE(ABORT, '{_MESSAGE}'); END"
        for verb in _VERBS
    ],
    "postgresql": [
        f"CREATE FUNCTION policy_versions_kept() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{_MESSAGE}'; END $$",
        "CREATE TRIGGER policy_versions_kept BEFORE UPDATE OR DELETE OR TRUNCATE ON policy_versions "
        "FOR EACH STATEMENT EXECUTE FUNCTION policy_versions_kept()",
    ],
}
_DROPPED = {
    "sqlite": [f"DROP TRIGGER policy_versions_{verb.lower()}" for verb in _VERBS],
    "postgresql": [
        "DROP TRIGGER policy_versions_kept ON policy_versions",
        "DROP FUNCTION policy_versions_kept",
    ],
}


def upgrade() -> None:
    for statement in _MADE[op.get_bind().dialect.name]:
        op.execute(statement)


def downgrade() -> None:
    for statement in _DROPPED[op.get_bind().dialect.name]:
        op.execute(statement)
