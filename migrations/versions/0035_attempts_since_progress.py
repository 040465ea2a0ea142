"""Count attempts since a job's last progress, count waits for services, and let a job avoid a worker."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision = "0034"

_COLUMNS = ("attempt_base", "furthest_step", "waits", "avoids", "avoids_until")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("attempt_base", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("furthest_step", sa.Integer(), nullable=True))
    op.add_column("jobs", sa.Column("waits", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("avoids", sa.String(), nullable=True))
    op.add_column("jobs", sa.Column("avoids_until", sa.Double(), nullable=True))


def downgrade() -> None:
    for name in reversed(_COLUMNS):
        op.drop_column("jobs", name)
