"""The seconds for which an attempt of a job had a valid lease: the most that it can have computed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0066"
down_revision = "0065"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("leased_seconds", sa.Double(), server_default="0", nullable=False))


def downgrade() -> None:
    op.drop_column("jobs", "leased_seconds")
